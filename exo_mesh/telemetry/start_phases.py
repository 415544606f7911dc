"""How long each phase of a node's start took, for the log."""

from __future__ import annotations

import logging

from exo_mesh.clock import Clock, monotonic

_log = logging.getLogger(__name__)


class StartPhases:
    """Call `done` at the end of each phase. clock: seconds."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self.took_s: dict[str, float] = {}
        """Seconds of each phase, in order."""

    def done(self, name: str) -> None:
        """A phase has ended now."""
        now = self._clock()
        self.took_s[name] = self.took_s.get(name, 0.0) + now - self._last
        self._last = now
        _log.debug("start: %s after %.2f s", name, now - self._began)

    @property
    def total_s(self) -> float:
        """From the first phase to the end of the last one."""
        return self._last - self._began

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.took_s.items())
