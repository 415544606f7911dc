"""The connections of the file server: a bounded number, of which idle ones make room for new ones."""

from __future__ import annotations

import contextlib
import socket
import threading

MAX_CONNECTIONS = 32
"""A thread each. A fetcher has up to 8."""


class FileConnection:
    """One accepted socket. It is idle whenever it has no whole request: before the first one, and between two."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_idle = True
        self.is_proven = False
        self.is_dropped = False

    def cut(self) -> None:
        """Let every call on the socket end. May be called from any thread; the owner of the socket closes it."""
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would also take away what the thread of this connection works with
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class FileConnections:
    """Admits connections up to a bound. The thread of each calls `begin`, `rest` and `leave`."""

    def __init__(self, bound: int = MAX_CONNECTIONS) -> None:
        self._bound = bound
        self._changed = threading.Condition()
        self._open: list[FileConnection] = []
        """The one first that has been in its state for the longest time."""
        self._is_waiting = False
        self._is_closed = False

    @property
    def is_crowded(self) -> bool:
        """Whether a new connection waits for room. Requests that only wait should end, since a client can retry."""
        return self._is_waiting

    def admit(self, sock: socket.socket) -> FileConnection | None:
        """Take a connection in: at the bound, in place of the one that has been idle for the longest time, of those
        first that have not proved to be clients of ours. If all are at work, wait. None if the server stops."""
        with self._changed:
            while not self._is_closed and not self._has_room():
                self._is_waiting = True
                self._changed.wait()
            self._is_waiting = False
            if self._is_closed:
                return None
            connection = FileConnection(sock)
            self._open.append(connection)
            return connection

    def begin(self, connection: FileConnection) -> bool:
        """A whole request has come; False if the connection was dropped just before."""
        return self._change(connection, is_idle=False)

    def rest(self, connection: FileConnection) -> bool:
        """The request is answered. False if the connection is to end, because others wait."""
        connection.is_proven = True
        return self._change(connection, is_idle=True) and not self.is_crowded

    def leave(self, connection: FileConnection) -> None:
        with self._changed:
            if connection in self._open:
                self._open.remove(connection)
            self._changed.notify_all()

    def close(self) -> None:
        """Cut all, and admit nobody any more."""
        with self._changed:
            self._is_closed = True
            for connection in self._open:
                connection.cut()
            self._changed.notify_all()

    def _change(self, connection: FileConnection, *, is_idle: bool) -> bool:
        with self._changed:
            if connection.is_dropped or self._is_closed:
                return False
            connection.is_idle = is_idle
            self._open.remove(connection)
            self._open.append(connection)
            self._changed.notify_all()
            return True

    def _has_room(self) -> bool:
        if len(self._open) < self._bound:
            return True
        idle = [connection for connection in self._open if connection.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda connection: connection.is_proven)  # the first of equals
        oldest.is_dropped = True
        oldest.cut()
        self._open.remove(oldest)
        return True
