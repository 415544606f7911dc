"""Measures how long frames take to come round the ring."""

from __future__ import annotations

from collections import deque

import numpy as np

from exo_mesh.base.telemetry.durations import LAP_BOUNDS_S, Durations

MAX_SAMPLES = 4096
"""Number of laps that the quantiles cover."""


class LapTimes:
    """Seconds per lap of the last MAX_SAMPLES laps, and of all laps in buckets. Written by the compute thread, read by
    the I/O thread."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}
        self._laps: deque[float] = deque(maxlen=MAX_SAMPLES)
        self.took = Durations(LAP_BOUNDS_S)
        self.count = 0

    def sent(self, step: int, now: float) -> None:
        self._sent[step] = now

    def forget_sent(self) -> None:
        """Forget the frames on their way: they will not come round, and step numbers restart."""
        self._sent.clear()

    def returned(self, step: int, now: float) -> float | None:
        """Note that a frame is back; returns how long its lap took, or None if the step is unknown."""
        start = self._sent.pop(step, None)
        if start is None:
            return None
        self._laps.append(now - start)
        self.took.add(now - start)
        self.count += 1
        return now - start

    def quantiles(self) -> tuple[float, float]:
        """(p50, p99) in seconds; zeros before the first lap."""
        laps = list(self._laps)
        if not laps:
            return 0.0, 0.0
        p50, p99 = np.quantile(laps, (0.5, 0.99))
        return float(p50), float(p99)
