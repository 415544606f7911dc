"""The connections of the file server: a bounded number; idle connections are closed for new ones."""

from __future__ import annotations

import contextlib
import socket
import threading

HEAD_S = 10.0
"""Time limit of the TLS handshake, and of a request's head from its first byte on, however slowly it arrives."""

IDLE_S = 60.0
"""Time limit between two requests."""

MAX_CONNECTIONS = 32
"""Most connections, with a thread each. A fetcher has up to 8."""


class FileConnection:
    """One accepted socket. It is idle while it has no complete request: before the first one, and between two."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_idle = True
        self.is_proven = False
        self.is_dropped = False

    def cut(self) -> None:
        """Ends every call on the socket. Any thread may call this; the thread that owns the socket closes it."""
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would also destroy the TLS state that the connection's thread uses
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class FileConnections:
    """Admits connections up to a bound. The thread of each connection calls `begin`, `rest` and `leave`."""

    def __init__(self, bound: int = MAX_CONNECTIONS) -> None:
        self._bound = bound
        self._changed = threading.Condition()
        self._open: list[FileConnection] = []
        """Sorted by the time of the last state change, oldest first."""
        self._is_waiting = False
        self._is_closed = False

    @property
    def is_crowded(self) -> bool:
        """Whether a new connection waits for a place. Requests that only wait must then end; their clients can
        retry."""
        return self._is_waiting

    def admit(self, sock: socket.socket) -> FileConnection | None:
        """Admits a connection. At the bound it replaces the connection that has been idle longest; connections without
        a completed request go first. It waits if all connections are busy. Returns None if the server stops."""
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
        """Marks a connection as busy, after a complete request; False if the connection was just dropped."""
        return self._change(connection, is_idle=False)

    def rest(self, connection: FileConnection) -> bool:
        """Marks a connection as idle, after an answer. False if the connection must end, because others wait."""
        connection.is_proven = True
        return self._change(connection, is_idle=True) and not self.is_crowded

    def leave(self, connection: FileConnection) -> None:
        with self._changed:
            if connection in self._open:
                self._open.remove(connection)
            self._changed.notify_all()

    def close(self) -> None:
        """Cuts all connections, and admits no more."""
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
        oldest = min(idle, key=lambda connection: connection.is_proven)  # the first of equals, so the longest idle
        oldest.is_dropped = True
        oldest.cut()
        self._open.remove(oldest)
        return True
