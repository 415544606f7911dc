"""gRPC channel and server options and addresses, the same for the control and the data plane."""

from __future__ import annotations

from exo_mesh.transport.incoming import MAX_BYTES

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Upper bound of any gRPC message that nothing else bounds: an answer that was asked for, such as that of a self-test.
Ring messages stay at 1 MiB; transport/incoming.py has the limits of what comes unasked."""

STREAM_WINDOW_BYTES = 32 * 1024 * 1024
"""What a sender may have on its way before the receiver reads it: a whole prefill chunk, so that its transfer goes on
while the receiver computes. Fixed, because probing for it starts at 64 KiB and costs pings."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.max_frame_size", 4 * 1024 * 1024),  # one HTTP/2 frame for a ring message instead of 64
    # A stopped process keeps its TCP connection; only an unanswered HTTP/2 ping shows it. Without ping_timeout_ms
    # grpc waits 60 s for the answer, whatever the keepalive settings say. Two seconds, because a ping waits behind what
    # the kernel has buffered: with one, a prefill chunk broke a hop of 30 Mbit/s again and again.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
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

TOKENS: list[tuple[str, int]] = [("grpc.http2.lookahead_bytes", 64 * 1024)]
"""For the stream of tokens from a driver: thousands of them may be on their way to a reader who does not read, and then
his request is parked. With STREAM_WINDOW_BYTES it would be a million."""

QUIET: list[tuple[str, int]] = [("grpc.keepalive_permit_without_calls", 0)]
"""For the control plane, instead of what stands above. Between any two nodes of a mesh there may be a control channel:
pings on idle ones would grow with the square of the mesh (40 KB/s per node with 200). The membership asks who lives; a
report stream is a call, and keeps its pings."""


CONTROL_SERVER: list[tuple[str, int]] = [
    *QUIET,
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.http2.lookahead_bytes", MAX_BYTES),
    ("grpc.max_concurrent_streams", 256),
]
"""For the control server: gRPC itself answers RESOURCE_EXHAUSTED to a longer message, before it has taken it in."""


def bracketed(host: str) -> str:
    """A host as it goes before ":port": an IPv6 address in brackets, anything else as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
