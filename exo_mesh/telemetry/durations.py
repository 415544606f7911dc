"""Durations counted in buckets, as Prometheus wants them: made in a runner, shown by its node."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LAP_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Of laps and hops: from rings of one machine to a prefill chunk over a slow link."""
WAIT_BOUNDS_S = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Of requests in the queue, which refuses them after two minutes."""


class Durations:
    """counts[i] is how many were at most bounds[i] and more than the bound before; the last one has what is longer.
    Written by one thread; another may read, and sees one moment or the next."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self._bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds


def cumulative(bounds_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(upper bound, how many were at most that), the last one "+Inf"; zeros where counts are missing."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for index, bound in enumerate((*map(str, bounds_s), "+Inf")):
        total += counts[index] if index < len(counts) else 0
        buckets.append((bound, total))
    return buckets
