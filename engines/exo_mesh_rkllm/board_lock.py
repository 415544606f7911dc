"""Lets one process at a time use a board: each model has a runner of its own, and the board has one NPU."""

from __future__ import annotations

import errno
import hashlib
import socket
import sys

_NAME = "\0exo-mesh-rkllm-"
"""Of a socket in Linux's abstract namespace: it is no file, and ends with the process that holds it."""


class BoardLock:
    """A lock on the board of a server, "host:port", among the processes of this machine. Only Linux has it; elsewhere
    it is always free."""

    def __init__(self, server: str) -> None:
        self._address = _NAME + hashlib.sha256(server.encode()).hexdigest()[:32]
        self._held: socket.socket | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free, and return whether it was taken. Never waits."""
        assert self._held is None, "the lock is held already"
        if sys.platform != "linux":
            return True
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            holder.bind(self._address)
        except OSError as exc:
            holder.close()
            if exc.errno == errno.EADDRINUSE:
                return False
            raise
        self._held = holder
        return True

    def release(self) -> None:
        """Free the lock; without effect if it is not held."""
        held, self._held = self._held, None
        if held is not None:
            held.close()
