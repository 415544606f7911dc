"""Finds the nucleus of top_p: the smallest set of most likely tokens that holds a share of all weights."""

from __future__ import annotations

import math

import numpy as np

from exo_mesh.runner.sampling.weights_of_logits import FEW, Doubles, Floats, Ids, rough_sum, weights_of

NUCLEUS_START = 256
"""Candidates that are sorted at first; most nuclei are smaller than this."""

DEPTH = 20.0
"""exp(-20) is 2e-9: all tokens of a large vocabulary below it together weigh at most 0.0004 of the most likely one."""

ROUGH = 1e-4
"""Bound of the relative error of a sum of float32 exponentials. The differences, at most 88, have errors of 2^-24, the
sum of pairs has less."""

ROUNDING = 1e-12
"""Bound of the relative difference between two sums of the same doubles in another order."""


def nucleus_of(logits: Floats, best: int, temperature: float, top_p: float) -> Ids | None:
    """The ids, ascending, of the nucleus among all tokens, without all weights in double precision. None if
    only all weights determine it, or if too many tokens are candidates.

    First the unlikely tokens are only counted, so the sum of all weights lies between two bounds. If both give the same
    nucleus, it is the right one. Otherwise a rough sum gives closer bounds.
    """
    if (ids := _within(logits, best, DEPTH * temperature)) is not None:
        weights = weights_of(logits, best, temperature, ids)
        least = float(weights.sum())
        most = least + (logits.size - ids.size) * math.exp(-DEPTH)
        if (kept := _between(weights, top_p * least, top_p * most)) is not None:
            return ids[kept]
    rough = rough_sum(logits, best, temperature)
    if not math.isfinite(rough):  # a temperature too small for float32
        return None
    unneeded = 0.5 * (1.0 - top_p) * rough  # the weights that are left out sum to less than this
    ids = _within(logits, best, max(0.0, math.log(logits.size / unneeded)) * temperature)
    if ids is None:
        return None
    kept = _between(
        weights_of(logits, best, temperature, ids), top_p * rough * (1.0 - ROUGH), top_p * rough * (1.0 + ROUGH)
    )
    return None if kept is None else ids[kept]


def nucleus(weights: Doubles, top_p: float) -> Ids:
    """Indexes, ascending, of the smallest set of largest weights that holds top_p of their sum; at least one. Among
    equals at the border the lowest indexes win."""
    wanted = top_p * float(weights.sum())
    falling, count = _falling(weights, wanted)
    return from_border(weights, falling[count - 1], count)


def from_border(values: Floats, border: np.floating, count: int) -> Ids:
    """Indexes, ascending, of `count` largest values, of which `border` is the smallest. Among equals at the border the
    lowest indexes win."""
    above = np.flatnonzero(values > border)
    equal = np.flatnonzero(values == border)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))


def _within(logits: Floats, best: int, depth: float) -> Ids | None:
    """The ids of the logits that are at most `depth` below the best one; None if they are many."""
    is_near = logits >= logits[best] - depth
    return None if int(np.count_nonzero(is_near)) * FEW > logits.size else np.flatnonzero(is_near)


def _between(weights: Doubles, least: float, most: float) -> Ids | None:
    """The nucleus whose sum reaches a number between these two; None if not all numbers between them give the same."""
    least, most = least * (1.0 - ROUNDING), most * (1.0 + ROUNDING)
    falling, count = _falling(weights, most)
    reached = np.cumsum(falling[:count])
    if reached[-1] < most or (count > 1 and reached[-2] >= least):
        return None
    return from_border(weights, falling[count - 1], count)


def _falling(weights: Doubles, wanted: float) -> tuple[Doubles, int]:
    """The largest weights in falling order, and how many of them it takes to reach a sum; all of them if they do not
    reach it."""
    k = min(NUCLEUS_START, weights.size)
    while True:
        top = weights if k == weights.size else np.partition(weights, weights.size - k)[-k:]
        falling = np.sort(top)[::-1]  # to sort values takes a tenth of what it takes to sort indexes
        cumulative = np.cumsum(falling)
        if cumulative[-1] >= wanted or k == weights.size:
            return falling, min(int(np.searchsorted(cumulative, wanted, side="left")) + 1, k)
        k = min(k * 8, weights.size)
