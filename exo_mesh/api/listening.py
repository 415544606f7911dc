"""The socket that the HTTP API listens on."""

from __future__ import annotations

import socket

SEND_BUFFER_BYTES = 256 * 1024
"""What the kernel may hold of an answer that its client does not read. By itself it would hold 4 MiB of each."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine; port 0 is any free one. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        bound.bind(address)
        bound.listen(1024)  # only now does the system say that somebody else listens here
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound
