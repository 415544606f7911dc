"""Options of gRPC channels and servers, and the formatting of addresses, shared by the control and the data plane."""

from __future__ import annotations

import sys

from exo_mesh.wire.incoming import MAX_BYTES

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest gRPC message for which no other limit applies: a requested reply, such as a self-test's. Ring messages stay
below 9 MiB; wire/incoming.py limits unrequested messages."""

STREAM_WINDOW_BYTES = 32 * 1024 * 1024
"""Bytes that a sender may have in transit before the receiver reads them: a whole prefill chunk, so that its transfer
continues while the receiver computes. Fixed, because probing for it starts at 64 KiB and costs pings."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
    # Instead of 16 KiB, to save CPU time. No longer than this, because a ping waits until an HTTP/2 frame is written.
    ("grpc.http2.max_frame_size", 1024 * 1024),
    # A stopped process keeps its TCP connection open; only an unanswered HTTP/2 ping reveals it. Without
    # ping_timeout_ms grpc waits 60 s for the answer, regardless of the keepalive settings. Two seconds, because a ping
    # waits behind what the kernel has buffered: with one second, a prefill chunk repeatedly broke a hop of 30 Mbit/s.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [*_COMMON, ("grpc.use_local_subchannel_pool", 1)]
"""For every channel. Each has its own subchannel pool, so that closing one channel never affects another to the same
peer."""

HANDSHAKE_S = 15.0
"""How long a connection may take until HTTP/2 is set up, with TLS if there are credentials; as long as the head of a
request to the API. gRPC's default is 120 s."""

IDLE_S = 60.0
"""A connection to a control port without a call is closed after this time. Nodes close theirs after 3 s."""

MAX_CONNECTIONS = 1024
"""Most connections to a control port; further ones are closed at once. A connection that only began a TLS handshake
takes about 60 kB, so a flood adds at most 60 MB. In a mesh of 200 peers a node has fewer than 600."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
]
"""For every server. Ports are not shared: a second process on a port must fail and use another port."""

TOKENS: list[tuple[str, int]] = [("grpc.http2.lookahead_bytes", 64 * 1024)]
"""For the stream of tokens from a driver. If the reader stops reading, thousands of tokens may be in transit before its
request is parked; with STREAM_WINDOW_BYTES it would be a million."""

QUIET: list[tuple[str, int]] = [("grpc.keepalive_permit_without_calls", 0)]
"""Overrides for the control plane. Any two nodes of a mesh may have a control channel, so pings on idle channels would
grow with the square of the mesh (40 KB/s per node with 200). The membership detects dead peers; a report stream is a
call and keeps its pings."""


QUIET_REPORTS: list[tuple[str, int]] = [("grpc.keepalive_time_ms", 20_000)]
"""Overrides for the reports of a stage whose ring is idle: a ping each second wakes both machines some twenty times.
Probes show within seconds that the node is gone, and its owner then reads the reports without these overrides."""

CONTROL_SERVER: list[tuple[str, int]] = [
    *QUIET,
    # The callers ping; a caller that is gone keeps a stream of reports until then, which holds nothing up.
    *QUIET_REPORTS,
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.http2.lookahead_bytes", MAX_BYTES),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_connection_idle_ms", int(1000 * IDLE_S)),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
]
"""For the control server: gRPC itself answers RESOURCE_EXHAUSTED to a longer message, before it has received all of
it."""


def bracketed(host: str) -> str:
    """A host as written before ":port": an IPv6 address in brackets, any other host unchanged."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


QUICK_POLLING = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"} if sys.platform == "linux" else {}
"""gRPC's event engine reads a socket in one thread, handles the bytes in another and notifies a third; without the
engine the third thread does all of it. That saves a quarter of a hop, and the wake-ups of an idle node, measured on
Linux; other systems are not measured."""
