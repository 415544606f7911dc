"""Does a figure rise? A slope that a few odd samples do not move, and what noise alone would make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trend:
    """slope: of a figure against a count, by Theil and Sen: the median of the slopes between all pairs of samples.
    growth: the slope times the span of the counts. spread: from the lowest to the highest sample once the slope is
    taken out, so what the samples wander by themselves over the same span."""

    slope: float
    growth: float
    spread: float

    def rises(self, allowance: float) -> bool:
        """Is the growth more than the samples wander by themselves, and more than the allowance?"""
        return self.growth > max(self.spread, allowance)


def trend(counts: Sequence[float], figures: Sequence[float]) -> Trend:
    """Of at least two samples with rising counts."""
    x, y = np.asarray(counts, float), np.asarray(figures, float)
    first, second = np.triu_indices(len(x), 1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    left = y - slope * x
    return Trend(slope, slope * float(x[-1] - x[0]), float(np.ptp(left)))


def second_half(counts: Sequence[float], figures: Sequence[float]) -> Trend:
    """Without what a start costs: pools that fill up, code that is used for the first time."""
    half = len(counts) // 2
    return trend(counts[half:], figures[half:])
