"""gRPC channel and server options, the same for the control and the data plane."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Upper bound of any gRPC message; ring messages stay at 1 MiB."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A stopped process keeps its TCP connection; only an unanswered HTTP/2 ping shows it. Without ping_timeout_ms
    # grpc waits 60 s for the answer, whatever the keepalive settings say.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [*_COMMON, ("grpc.use_local_subchannel_pool", 1)]
"""For every channel. Its own subchannel pool, so that closing one channel never touches another to the same peer."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]
"""For every server. No port sharing: a second process on a port must fail, and take another one."""
