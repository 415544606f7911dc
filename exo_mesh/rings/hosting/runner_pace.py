"""Scales the limits of the next runner by how long recent starts and loads took on this machine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from exo_mesh.domain.runner_limits import RunnerLimits

SLOWER = 8.0
"""A load may be this much slower than the slowest of the last loads of its engine: other programs may use the disk."""


@dataclass(slots=True)
class RunnerPace:
    """Durations of the last starts and loads on this machine. `scaled` only ever grants more time than the defaults."""

    _starts_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _bytes_per_s: dict[str, deque[float]] = field(default_factory=dict)

    def started(self, seconds: float) -> None:
        """Note the seconds from the start of a runner to its first report."""
        self._starts_s.append(seconds)

    def loaded(self, engine: str, num_bytes: int, seconds: float) -> None:
        """Note the load of a stage with `num_bytes` of weights."""
        if num_bytes > 0 and seconds > 0:
            self._bytes_per_s.setdefault(engine, deque(maxlen=16)).append(num_bytes / seconds)

    def scaled(self, limits: RunnerLimits, engine: str) -> RunnerLimits:
        """The limits for the next runner of an engine here."""
        slowest = min(self._bytes_per_s.get(engine, ()), default=limits.load_bytes_per_s * SLOWER)
        return replace(
            limits,
            first_message_s=max(limits.first_message_s, SLOWER * max(self._starts_s, default=0.0)),
            load_bytes_per_s=min(limits.load_bytes_per_s, slowest / SLOWER),
        )
