"""Counts durations in the buckets of a Prometheus histogram: in a runner, for its node to show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

LAP_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for laps and hops: from a ring on one machine to a prefill chunk over a slow link."""
WAIT_BOUNDS_S = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Buckets for the wait in the queue, which refuses requests after two minutes."""


class DurationCounts(msgspec.Struct, frozen=True):
    """The state of a histogram: its counts, and the sum of all durations."""

    counts: tuple[int, ...] = ()
    sum_s: float = 0.0


class Durations:
    """A histogram of durations. counts[i]: durations in (bounds[i - 1], bounds[i]]; the last count has all longer ones.

    One thread writes; another may read, and may see the state before or after a write.
    """

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self._bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    def snapshot(self) -> DurationCounts:
        """The state of this moment."""
        return DurationCounts(tuple(self.counts), self.sum_s)


def cumulative(bounds_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(upper bound, number of durations up to it) for each bucket, the last "+Inf"; missing counts are 0."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for index, bound in enumerate((*map(str, bounds_s), "+Inf")):
        total += counts[index] if index < len(counts) else 0
        buckets.append((bound, total))
    return buckets
