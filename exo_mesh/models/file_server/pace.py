"""Slows copies down while streams run: all copies of a process together then use at most a quarter of the time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from exo_mesh.base.clock import Clock, monotonic

RESTS_PER_PIECE = 3.0
"""After a piece that took t seconds a copy pauses for 3 t."""

BUSY_PIECE_BYTES = 256 * 1024

MAX_REST_S = 1.0
"""Longest pause. A piece that takes a third of a second or more waits for a slow network or reader."""

_LOOK_EVERY_S = 0.05
"""How soon a pausing copy notices that no stream runs any more."""


class CopyPace:
    """Shared by all copies of a process, each in a thread of its own. is_busy: whether streams run on this machine."""

    def __init__(self, is_busy: Callable[[], bool] = lambda: False, clock: Clock = monotonic) -> None:
        self._is_busy = is_busy
        self._clock = clock
        self._lock = threading.Lock()
        self._num_copies = 0

    @property
    def is_busy(self) -> bool:
        return self._is_busy()

    def piece_bytes(self, otherwise: int) -> int:
        """Returns how many bytes to copy before the next pause; `otherwise` if no streams run."""
        return min(otherwise, BUSY_PIECE_BYTES) if self._is_busy() else otherwise

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Counts a running copy: n concurrent copies pause so long that together they keep to the quarter."""
        with self._lock:
            self._num_copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_copies -= 1

    def rest_s(self, took_s: float) -> float:
        """Returns how long to pause after a piece that took `took_s`, if streams run."""
        num_copies = max(1, self._num_copies)
        return min(MAX_REST_S, took_s * ((RESTS_PER_PIECE + 1) * num_copies - 1))

    def rest(self, took_s: float, stopping: threading.Event) -> None:
        """Pauses after a piece that took `took_s`; returns at once when no streams run."""
        if not self._is_busy():
            return
        end = self._clock() + self.rest_s(took_s)
        while (left := end - self._clock()) > 0 and self._is_busy():
            if stopping.wait(min(left, _LOOK_EVERY_S)):
                return
