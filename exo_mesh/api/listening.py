"""Opens the socket that the HTTP API listens on."""

from __future__ import annotations

import socket

SEND_BUFFER_BYTES = 256 * 1024
"""Most bytes of an answer that the kernel buffers while its client does not read; the default would be 4 MiB."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine; port 0 means any free port. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        bound.bind(address)
        bound.listen(1024)  # with SO_REUSEADDR this call can fail, too, if another process listens here
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound
