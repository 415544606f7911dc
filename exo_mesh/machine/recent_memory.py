"""Keeps the last memory reading for a moment."""

from __future__ import annotations

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.machine.memory import MemoryReader, MemoryReading

RECENT_S = 0.2
"""Long enough for one turn of the event loop, in which several parts of a node ask, and for a probe and its answer.
Shorter than the pause between two heartbeats, by which a node knows what its runners hold."""


class RecentMemory:
    """Reads the memory at most once in max_age_s: an idle node asks several times in one turn of its loop, and each
    reading opens a dozen files. Raises what `read` raises. From any thread."""

    def __init__(self, read: MemoryReader, max_age_s: float = RECENT_S, clock: Clock = monotonic) -> None:
        self._read = read
        self._max_age_s = max_age_s
        self._clock = clock
        self._last: tuple[float, MemoryReading] | None = None

    def __call__(self) -> MemoryReading:
        now, last = self._clock(), self._last
        if last is None or now - last[0] >= self._max_age_s:
            self._last = last = now, self._read()
        return last[1]
