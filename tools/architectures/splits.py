"""The splits that are tested, and how far their logits are from those of mlx-lm alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import StageEngine
from tools.architectures.sequences import Alone
from tools.stages import CONTEXT, forward, insert, remove

MAX_THREE_WAY = 5
"""Three-stage splits of one model: all of them up to this number, beyond that evenly spaced ones."""

Split = tuple[int, ...]


def splits_of(legal_cuts: Sequence[int], *, few: bool = False) -> list[Split]:
    """Lists the splits: unsplit, every cut in two, and cuts in three; or only a few of each."""
    if few:
        return [(), *{legal_cuts[:1], legal_cuts[len(legal_cuts) // 2 :][:2]}] if legal_cuts else [()]
    triples = list(combinations(legal_cuts, 2))
    step = max(1, -(-len(triples) // MAX_THREE_WAY))
    return [(), *((cut,) for cut in legal_cuts), *triples[::step]]


def one_sequence_difference(stages: Sequence[StageEngine], alone: Alone) -> float:
    """The largest difference of any logit at any position from mlx-lm alone; 0.0 if every bit is equal."""
    insert(stages, [1])
    worst = 0.0
    for (pos0, n), expected in zip(alone.schedule, alone.logits, strict=True):
        got = forward(stages, [Row(1, pos0, n, n)], alone.token_ids[pos0 : pos0 + n])
        worst = max(worst, difference(got, expected))
    remove(stages, [1])
    return worst


def together_difference(stages: Sequence[StageEngine], sequences: Sequence[Alone]) -> float:
    """The same for sequences of different lengths that share every frame."""
    insert(stages, range(1, len(sequences) + 1))
    worst = 0.0
    for step in range(len(sequences[0].schedule)):
        rows = [Row(i, *alone.schedule[step], 1) for i, alone in enumerate(sequences, 1)]
        ids = [alone.token_ids[row.pos0 : row.pos0 + row.n] for row, alone in zip(rows, sequences, strict=True)]
        got = forward(stages, rows, [token for part in ids for token in part])
        expected = np.stack([alone.logits[step][-1] for alone in sequences])
        worst = max(worst, difference(got, expected))
    remove(stages, range(1, len(sequences) + 1))
    return worst


def restored_difference(stages: Sequence[StageEngine], alone: Alone) -> float:
    """The same for the last steps of a sequence into which the first one's KV was copied half-way on every stage."""
    insert(stages, [1])
    half = len(alone.schedule) // 2
    for pos0, n in alone.schedule[:half]:
        forward(stages, [Row(1, pos0, n, 1)], alone.token_ids[pos0 : pos0 + n])
    for stage in stages:
        stage.restore(2, CONTEXT, stage.save(1))
    worst = 0.0
    for (pos0, n), expected in zip(alone.schedule[half:], alone.logits[half:], strict=True):
        got = forward(stages, [Row(2, pos0, n, n)], alone.token_ids[pos0 : pos0 + n])
        worst = max(worst, difference(got, expected))
    remove(stages, [1, 2])
    return worst


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Returns 0.0 if all bits are equal (NaN and infinities too); infinity if shapes or finite positions differ."""
    if got.shape != expected.shape:
        return float("inf")
    if np.array_equal(got.view(np.uint32), expected.astype(np.float32).view(np.uint32)):
        return 0.0
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    return max(float(np.abs(got[finite] - expected[finite]).max()), float(np.finfo(np.float32).tiny))
