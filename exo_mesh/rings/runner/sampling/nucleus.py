"""Finds the nucleus of top_p: the smallest set of most likely tokens that holds a share of all weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from exo_mesh.rings.runner.sampling.weights_of_logits import FEW, Doubles, Floats, Ids, rough_weights, weights_of

NUCLEUS_START = 256
"""Candidates that are sorted at first; most nuclei are smaller than this."""

DEPTH = 20.0
"""exp(-20) is 2e-9: all tokens of a large vocabulary below it together weigh at most 0.0004 of the most likely one."""

SPARSE = 64
"""Finding the ids of one token in 64 takes a quarter of what a rough sum of all weights takes; one in 10 takes twice
that sum."""

SHALLOW = 6.0
"""exp(-6) is 0.0025. Where a few tokens are likely, 90 % of the weight is usually above it, in some ten tokens."""

ROUGH = 1e-4
"""Bound of the relative error of a sum of float32 exponentials. The differences, at most 88, have errors of 2^-24, the
sum of pairs has less."""

SUMMING = 1e-5
"""Bound of the relative error of a difference of two float32 sums of the same exponentials: NumPy adds pairs of blocks,
so that no number goes through more than 60 additions."""

SAMPLE = 512
"""Weights that are looked at to guess how deep the nucleus reaches; a guess that is wrong costs time, never the
result."""

ROUNDING = 1e-12
"""Bound of the relative difference between two sums of the same doubles in another order."""

ONE_BY_ONE = 1e-10
"""The same bound where one of the sums adds up to a million doubles one after the other: each addition has an error of
2^-53."""

FINE_SAMPLE = 4096
"""Weights that are looked at to find where a large nucleus ends."""

MARGIN = 96
"""Sampled weights on either side of the expected border, between which the border nearly always is: three standard
deviations of a median."""

LARGE = 16 * FINE_SAMPLE
"""Fewer weights are sorted as fast as they are sampled."""


def nucleus_of(logits: Floats, best: int, temperature: float, top_p: float) -> Ids | None:
    """The ids, ascending, of the nucleus among all tokens, without all weights in double precision. None if
    only all weights determine it, or if too many tokens are candidates.

    If few tokens are near the best one, all others are only counted, so the sum of all weights lies between two bounds.
    If both give the same nucleus, it is the right one. Otherwise a rough sum of the other tokens gives closer bounds,
    for as many candidates as the nucleus needs.
    """
    if (ids := _within(logits, best, DEPTH * temperature, SPARSE)) is not None:
        weights = weights_of(logits, best, temperature, ids)
        least = float(weights.sum())
        most = least + (logits.size - ids.size) * math.exp(-DEPTH)
        if (kept := _between(weights, top_p * least, top_p * most)) is not None:
            return ids[kept]
    rough = rough_weights(logits, best, temperature)
    total = float(rough.sum())
    if not math.isfinite(total):  # a temperature too small for float32
        return None
    too_deep = 0.0  # a weight that too many tokens have; so many or more have a lower weight, too
    for border, is_careful in _borders(rough, 0.5 * (1.0 - top_p) * total):
        ids = _within(logits, best, max(0.0, -math.log(border)) * temperature) if border > too_deep else None
        if ids is None:
            too_deep = max(too_deep, border)
            continue
        weights = weights_of(logits, best, temperature, ids)
        least, most = _bounds(float(weights.sum()), rough, ids, total, is_careful=is_careful)
        if (kept := _between(weights, top_p * least, top_p * most)) is not None:
            return ids[kept]
    return None


def _borders(rough: Floats, unneeded: float) -> Iterator[tuple[float, bool]]:
    """The weights that candidates must have, one attempt after the other, and whether to sum the others carefully. The
    first one is a guess for peaked distributions, unless a sample says that it is too large. The weights below the
    sampled one sum to about `unneeded`, those below the last one to no more than that."""
    shallow, step = math.exp(-SHALLOW), _step(rough)
    sample = rough[::step]
    if float(sample[sample < shallow].sum()) * step < 1.5 * unneeded:
        yield shallow, False
    sampled = _sampled_border(rough, unneeded)
    yield sampled, False
    yield sampled, True
    yield unneeded / rough.size, True


def _bounds(inside: float, rough: Floats, ids: Ids, total: float, *, is_careful: bool) -> tuple[float, float]:
    """The least and the most that all weights can sum to. inside: the sum for `ids`; total: of `rough`. is_careful:
    sum the others again, without `ids`, which changes `rough`; otherwise take a difference, which is faster."""
    if is_careful:
        rough[ids] = 0.0
        outside, error = float(rough.sum()), 0.0
    else:
        outside, error = max(0.0, total - float(rough[ids].sum())), SUMMING * total
    error += ROUGH * outside
    return inside + max(0.0, outside - error), inside + outside + error


def nucleus(weights: Doubles, top_p: float) -> Ids:
    """Indexes, ascending, of the smallest set of largest weights that holds top_p of their sum; at least one. Among
    equals at the border the lowest indexes win."""
    wanted = top_p * float(weights.sum())
    if (found := _large_nucleus(weights, wanted)) is not None:
        return found
    falling, count = _falling(weights, wanted)
    return from_border(weights, falling[count - 1], count)


def _large_nucleus(weights: Doubles, wanted: float) -> Ids | None:
    """The same for many weights: sorts only the weights near the border, and only sums the larger ones. A sample says
    where the border is. None if it is not there, or if the sum there is so close to `wanted` that the order of
    additions matters."""
    if weights.size < LARGE:
        return None
    step = weights.size // FINE_SAMPLE
    rising = np.sort(weights[::step])
    # From below, because a sample may miss the few largest weights.
    cut = int(np.searchsorted(np.cumsum(rising) * step, float(weights.sum()) - wanted))
    low, high = rising[max(0, cut - MARGIN)], rising[min(cut + MARGIN, rising.size - 1)]
    # The sum of the weights above `high`, without gathering them, which would take longer.
    num_above = int(np.count_nonzero(weights > high))
    sum_above = float((np.maximum(weights, high) - high).sum()) + num_above * float(high)
    near = np.sort(weights[(weights >= low) & (weights <= high)])[::-1]
    reached = np.cumsum(near)
    reached += sum_above
    index = int(np.searchsorted(reached, wanted))
    if index == 0 or index == reached.size:
        return None
    if reached[index] < wanted * (1.0 + ONE_BY_ONE) or reached[index - 1] > wanted * (1.0 - ONE_BY_ONE):
        return None
    return from_border(weights, near[index], num_above + index + 1)


def from_border(values: Floats, border: np.floating, count: int) -> Ids:
    """Indexes, ascending, of the `count` largest values; `border` is the smallest of them. Among equals at the border
    the lowest indexes win."""
    is_in = values >= border
    if int(np.count_nonzero(is_in)) == count:
        return np.flatnonzero(is_in)
    above = np.flatnonzero(values > border)
    equal = np.flatnonzero(values == border)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))


def _within(logits: Floats, best: int, depth: float, sparse: int = FEW) -> Ids | None:
    """The ids of the logits that are at most `depth` below the best one; None if they are more than one in `sparse`."""
    border = logits[best] - depth
    step = logits.size // SAMPLE
    if step > 1:  # a look at a few saves the look at all
        sample = logits[::step]
        if int(np.count_nonzero(sample >= border)) * sparse > 2 * sample.size:
            return None
    is_near = logits >= border
    return None if int(np.count_nonzero(is_near)) * sparse > logits.size else np.flatnonzero(is_near)


def _sampled_border(weights: Floats, unneeded: float) -> float:
    """A weight such that the smaller ones sum to about `unneeded`, from a sample of the weights; more than 0."""
    step = _step(weights)
    rising = np.sort(weights[::step])
    cut = int(np.searchsorted(np.cumsum(rising), unneeded / step))
    return max(float(rising[min(cut, rising.size - 1)]), unneeded / weights.size)


def _step(weights: Floats) -> int:
    """The distance between sampled weights."""
    return max(1, weights.size // SAMPLE)


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
