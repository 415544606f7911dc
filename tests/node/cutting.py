"""Cutting a single TCP connection of this process, as a router that forgets it would."""

from __future__ import annotations

import os
import socket

import psutil


def cut_connections_to(port: int) -> int:
    """Shut down every connection that this process has opened to a port; answers how many. Neither end asked for it:
    both see the stream end. Other processes' connections to the port are left alone."""
    cut = 0
    for connection in psutil.Process().net_connections(kind="tcp"):
        if connection.raddr and connection.raddr.port == port and connection.status == psutil.CONN_ESTABLISHED:
            with socket.socket(fileno=os.dup(connection.fd)) as same:
                same.shutdown(socket.SHUT_RDWR)
            cut += 1
    return cut
