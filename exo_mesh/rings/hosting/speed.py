"""Measures how fast this machine's engines are, from the stages that run here."""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

WINDOW = 32
"""Samples that count; one comes with a heartbeat, twice a second while a stage works."""

ENOUGH = 3
MIN_STEPS = 4
"""A heartbeat with fewer steps is ignored: it shows a moment, not the speed of the machine."""


class SpeedMeter(msgspec.Struct):
    """Seconds that a step takes per 1e9 bytes of weights, by engine: the median over the last samples.

    The median, because a prefill chunk takes many times as long as a decode step, and an empty frame almost nothing.
    """

    _samples: dict[str, deque[float]] = msgspec.field(default_factory=dict)

    def take(self, engine: str, step_bytes: int, busy_s: float, steps: int) -> None:
        """Note a sample: a stage that reads `step_bytes` of weights per step was busy for `busy_s` with `steps` steps
        since its last heartbeat. See ModelCard.step_bytes."""
        if steps >= MIN_STEPS and busy_s > 0 and step_bytes > 0:
            samples = self._samples.setdefault(engine, deque(maxlen=WINDOW))
            samples.append(busy_s / steps / (step_bytes / 1e9))

    def s_per_gb(self) -> dict[str, float]:
        """The speeds known so far."""
        return {engine: median(samples) for engine, samples in self._samples.items() if len(samples) >= ENOUGH}
