"""Cutting single TCP connections, as a router that forgets them would."""

from __future__ import annotations

import ctypes
import os
import socket

import psutil

_PIDFD_GETFD = 438
"""The number of this system call of Linux, the same on every architecture; Python has no function for it."""


def cut_connections_to(port: int, pid: int | None = None) -> int:
    """Shut down every connection that a process (by default this one) has opened to a port; answers how many.

    Neither end asked for it: both see the stream end. Connections of other processes to the port are left alone.
    Raises OSError where another process's sockets cannot be reached: only on Linux, and only those of a child.
    """
    cut = 0
    for connection in psutil.Process(pid).net_connections(kind="tcp"):
        if connection.raddr and connection.raddr.port == port and connection.status == psutil.CONN_ESTABLISHED:
            fd = os.dup(connection.fd) if pid is None else _fd_of(pid, connection.fd)
            with socket.socket(fileno=fd) as same:
                same.shutdown(socket.SHUT_RDWR)
            cut += 1
    return cut


def _fd_of(pid: int, fd: int) -> int:
    """A descriptor of ours for what a descriptor of another process means."""
    if not hasattr(os, "pidfd_open"):
        raise OSError("this system has no pidfd_getfd")
    process = os.pidfd_open(pid)
    try:
        copy = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, fd, 0))
        if copy < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return copy
    finally:
        os.close(process)
