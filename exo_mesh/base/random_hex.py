"""Random ids without a system call for each of them."""

from __future__ import annotations

import os
import threading

_POOL_BYTES = 4096


class RandomHex:
    """Hands out the system's random bytes as hexadecimal digits, and asks the system for many at once: each call of the
    system lets another thread run, for which the event loop then waits. From any thread; no byte is used twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = b""
        self._used = 0

    def __call__(self, num_bytes: int) -> str:
        """The next random bytes, at most 4,096, as hexadecimal digits."""
        with self._lock:
            if self._used + num_bytes > len(self._pool):
                self._pool, self._used = os.urandom(_POOL_BYTES), 0
            begin, self._used = self._used, self._used + num_bytes
            return self._pool[begin : self._used].hex()


random_hex = RandomHex()
"""The one pool of this process; a fork would share it, so processes are only ever spawned."""
