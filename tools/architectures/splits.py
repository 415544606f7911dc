"""The splits that are tried, and how one is run: real stages, loaded from disk, frames going from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from exo_mesh_mlx.engine import MlxStage

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import LoadRequest, StageInput
from tools.architectures.sequences import Alone

MAX_THREE_WAY = 5
"""Three-stage splits of one model: all of them up to this number, then evenly spaced ones."""

CONTEXT = 512

Split = tuple[int, ...]


def splits_of(legal_cuts: Sequence[int], *, few: bool = False) -> list[Split]:
    """Unsplit, every cut in two, and cuts in three; or only a few of each."""
    if few:
        return [(), *{legal_cuts[:1], legal_cuts[len(legal_cuts) // 2 :][:2]}] if legal_cuts else [()]
    triples = list(combinations(legal_cuts, 2))
    step = max(1, -(-len(triples) // MAX_THREE_WAY))
    return [(), *((cut,) for cut in legal_cuts), *triples[::step]]


class Stages:
    """Stages of one model, each loaded once and used by all splits that it is part of."""

    def __init__(self, model_dir: Path, num_layers: int) -> None:
        self._model_dir, self._num_layers = model_dir, num_layers
        self._loaded: dict[tuple[int, int], MlxStage] = {}

    def of(self, split: Split) -> list[MlxStage]:
        return [self._stage(*bounds) for bounds in zip((0, *split), (*split, self._num_layers), strict=True)]

    def all(self) -> list[MlxStage]:
        return list(self._loaded.values())

    def close(self) -> None:
        for stage in self._loaded.values():
            stage.close()
        self._loaded.clear()

    def _stage(self, start: int, stop: int) -> MlxStage:
        if (start, stop) not in self._loaded:
            stage = MlxStage()
            shard = Shard("tiny", start, stop, self._num_layers)
            stage.load(LoadRequest(shard, self._model_dir, CONTEXT), lambda done, total: None)
            self._loaded[start, stop] = stage
        return self._loaded[start, stop]


def forward(stages: Sequence[MlxStage], rows: Sequence[Row], token_ids: Sequence[int]) -> np.ndarray:
    """Logits `[sum(num_logits), vocab]` of one frame. Raises RuntimeError if a stage faults a row."""
    tensors: dict[str, Tensor] = {}
    logits = None
    for stage in stages:
        output = stage.forward(StageInput(tuple(rows), tuple(token_ids), tensors))
        if output.faults:
            raise RuntimeError(f"fault: {output.faults[0].message}")
        tensors, logits = dict(output.tensors), output.logits
    if logits is None:
        raise RuntimeError("the last stage gives no logits")
    return logits


def one_sequence_difference(stages: Sequence[MlxStage], alone: Alone) -> float:
    """Largest difference of any logit of any position from mlx-lm alone; 0.0 if every bit is equal."""
    with_sequences(stages, 1, insert=True)
    worst = 0.0
    for (pos0, n), expected in zip(alone.schedule, alone.logits, strict=True):
        got = forward(stages, [Row(1, pos0, n, n)], alone.token_ids[pos0 : pos0 + n])
        worst = max(worst, difference(got, expected))
    with_sequences(stages, 1, insert=False)
    return worst


def together_difference(stages: Sequence[MlxStage], sequences: Sequence[Alone]) -> float:
    """The same with sequences of different lengths that share every frame."""
    with_sequences(stages, len(sequences), insert=True)
    worst = 0.0
    for step in range(len(sequences[0].schedule)):
        rows = [Row(i, *alone.schedule[step], 1) for i, alone in enumerate(sequences, 1)]
        ids = [alone.token_ids[row.pos0 : row.pos0 + row.n] for row, alone in zip(rows, sequences, strict=True)]
        got = forward(stages, rows, [token for part in ids for token in part])
        expected = np.stack([alone.logits[step][-1] for alone in sequences])
        worst = max(worst, difference(got, expected))
    with_sequences(stages, len(sequences), insert=False)
    return worst


def restored_difference(stages: Sequence[MlxStage], alone: Alone) -> float:
    """The same of the last steps, by a sequence into which every stage's KV of the first one was copied half-way."""
    with_sequences(stages, 1, insert=True)
    half = len(alone.schedule) // 2
    for pos0, n in alone.schedule[:half]:
        forward(stages, [Row(1, pos0, n, 1)], alone.token_ids[pos0 : pos0 + n])
    for stage in stages:
        stage.restore(2, CONTEXT, stage.save(1))
    worst = 0.0
    for (pos0, n), expected in zip(alone.schedule[half:], alone.logits[half:], strict=True):
        got = forward(stages, [Row(2, pos0, n, n)], alone.token_ids[pos0 : pos0 + n])
        worst = max(worst, difference(got, expected))
    with_sequences(stages, 2, insert=False)
    return worst


def with_sequences(stages: Sequence[MlxStage], count: int, *, insert: bool) -> None:
    """Begin or end sequences 1..count on every stage."""
    for stage in stages:
        for sequence in range(1, count + 1):
            if insert:
                stage.insert(sequence, CONTEXT)
            else:
                stage.remove(sequence)


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """0.0 if all bits are equal (NaN and infinities too); infinity if shapes or what is finite differ."""
    if got.shape != expected.shape:
        return float("inf")
    if np.array_equal(got.view(np.uint32), expected.astype(np.float32).view(np.uint32)):
        return 0.0
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    return max(float(np.abs(got[finite] - expected[finite]).max()), float(np.finfo(np.float32).tiny))
