"""Measures the phases of a node's start, for the log."""

from __future__ import annotations

import logging

from exo_mesh.base.clock import Clock, monotonic

_log = logging.getLogger(__name__)


class StartPhases:
    """The durations of the phases of a start. Call `done` at the end of each phase. clock: seconds."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self.took_s: dict[str, float] = {}
        """Duration of each phase in seconds, in order."""

    def done(self, name: str) -> None:
        """Records the end of a phase."""
        now = self._clock()
        self.took_s[name] = self.took_s.get(name, 0.0) + now - self._last
        self._last = now
        _log.debug("start: %s after %.2f s", name, now - self._began)

    @property
    def total_s(self) -> float:
        """Seconds from the begin of the first phase to the end of the last one."""
        return self._last - self._began

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.took_s.items())
