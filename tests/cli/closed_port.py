"""A loopback port that nothing listens on."""

from __future__ import annotations

import socket


def closed_port() -> int:
    """Free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
