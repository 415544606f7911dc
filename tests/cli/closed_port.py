"""A loopback port that nothing listens on."""

from __future__ import annotations

import contextlib
import random
import socket


def closed_port() -> int:
    """Free now, for TCP and UDP. Below the ports that a system gives to sockets which ask for any (32768 to 60999 on
    Linux), so that no other process gets it soon."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports is free")
