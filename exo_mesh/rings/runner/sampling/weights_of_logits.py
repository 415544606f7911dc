"""Weights of tokens from logits, and one draw among them: the arithmetic of sampling, without needless copies.

A row of 152,000 logits makes arrays of 1 MB, whose pages the system would allocate and free for every draw. Here the
arrays are made once for each thread.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

NEGLIGIBLE = 37.0
"""exp(-37) is below the precision of a double next to 1: all tokens below it together do not move a border between two
others by more than 2e-11 of the whole."""

FEW = 8
"""Gathering a part of the logits takes about eight times as long per logit as reading all of them."""

SAFE_TEMPERATURE = 1e-200
"""Differences of float32 logits divided by more than this do not overflow a double. Switching warnings off and on takes
as long as the arithmetic of 1,000 logits."""

BLOCK = 1024
"""Weights summed at once; only in the block of the drawn token are they added up one by one."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.weights = np.zeros(0)
        self.rough = np.zeros(0, np.float32)
        self.generator = np.random.Philox(key=0)
        self.state: Any = self.generator.state


_scratch = _Scratch()


def likely(logits: Floats, best: int, temperature: float, min_p: float = 0.0) -> Ids | None:
    """The tokens, ascending, whose weight is not negligible, or may be `min_p` of the largest weight; None if they are
    too many to be gathered."""
    depth = NEGLIGIBLE if min_p <= 0 else min(NEGLIGIBLE, 0.01 - math.log(min_p))  # a little more than must be kept
    is_likely = logits >= logits[best] - depth * temperature
    if int(np.count_nonzero(is_likely)) * FEW > logits.size:
        return None
    return np.flatnonzero(is_likely)


def weights_of(logits: Floats, best: int, temperature: float, ids: Ids | None) -> Doubles:
    """exp((logit - largest logit) / temperature) of these tokens or of all; valid until this thread's next call."""
    chosen = logits if ids is None else logits[ids]
    if _scratch.weights.size < chosen.size:
        _scratch.weights = np.zeros(chosen.size)
    weights: Doubles = _scratch.weights[: chosen.size]
    # Subtract the maximum before dividing: then no temperature, however small, can overflow.
    np.subtract(chosen, float(logits[best]), out=weights, dtype=np.float64)
    if temperature > SAFE_TEMPERATURE and logits.dtype != np.float64:
        weights /= temperature
    else:
        with np.errstate(over="ignore"):
            weights /= temperature
    return np.exp(weights, out=weights)


def rough_weights(logits: Floats, best: int, temperature: float) -> Floats:
    """The weights of all tokens in float32: less than half of the time. The relative error of their sum, and of the sum
    of some of them, is below 1e-4. Not numbers if the temperature is too small for float32. Valid until this thread's
    next call; the caller may change them."""
    if _scratch.rough.size < logits.size:
        _scratch.rough = np.zeros(logits.size, np.float32)
    weights = _scratch.rough[: logits.size]
    np.subtract(logits, logits[best], out=weights, casting="same_kind", dtype=np.result_type(logits, np.float32))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if temperature != 1.0:
            weights *= np.float32(1.0 / temperature)
        np.exp(weights, out=weights)
    return weights


def index_at(weights: Doubles, share: float) -> int:
    """The index of the weight in whose interval `share` of their sum falls, 0 <= share < 1, with the intervals laid end
    to end in order; never of weight 0. At least one weight must be above 0."""
    if weights.size <= 2 * BLOCK:
        return _index_of(weights, share * float(weights.sum()))
    sums = np.add.reduceat(weights, np.arange(0, weights.size, BLOCK))
    ends = np.cumsum(sums)
    target = share * float(ends[-1])
    block = min(int(np.searchsorted(ends, target, side="right")), int(np.flatnonzero(sums)[-1]))
    before = float(ends[block - 1]) if block else 0.0
    begin = block * BLOCK
    return begin + _index_of(weights[begin : begin + BLOCK], target - before)


def _index_of(weights: Doubles, target: float) -> int:
    found = int(weights.cumsum().searchsorted(target, side="right"))
    if found < weights.size and weights[found] > 0:
        return found
    return min(found, int(np.flatnonzero(weights)[-1]))  # rounding has led beyond the last interval


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone: Philox 4x64 keyed by the seed, position as counter."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    state = _scratch.state
    state["state"]["key"][:] = seed & mask, 0
    state["state"]["counter"][:] = 0, position & mask, 0, 0
    state["buffer_pos"] = state["buffer"].size  # no random numbers of the last draw are left in the buffer
    _scratch.generator.state = state  # four times as fast as making a generator
    return int(_scratch.generator.random_raw() >> 11) * 2.0**-53
