"""How fast this machine's engines are, learnt from the stages that run here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

WINDOW = 32
"""Samples that count; one comes with a heartbeat, twice a second while a stage works."""

ENOUGH = 3
MIN_STEPS = 4
"""A heartbeat that covers fewer steps says more about its own moment than about the machine."""


@dataclass(slots=True)
class SpeedMeter:
    """Seconds that a step takes per 1e9 bytes of weights, by engine: the median over the last samples.

    The median, because a prefill chunk takes many times as long as a decode step, and an empty frame almost nothing.
    """

    _samples: dict[str, deque[float]] = field(default_factory=dict)

    def take(self, engine: str, step_bytes: int, busy_s: float, steps: int) -> None:
        """A stage that reads so many bytes of weights for a step was busy for so long with so many steps since its last
        heartbeat. See ModelCard.step_bytes."""
        if steps >= MIN_STEPS and busy_s > 0 and step_bytes > 0:
            samples = self._samples.setdefault(engine, deque(maxlen=WINDOW))
            samples.append(busy_s / steps / (step_bytes / 1e9))

    def s_per_gb(self) -> dict[str, float]:
        """What is known by now."""
        return {engine: median(samples) for engine, samples in self._samples.items() if len(samples) >= ENOUGH}
