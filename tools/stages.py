"""Stages of one model in this process, each loaded once, and frames that pass a ring of them once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import EngineProvider, LoadRequest, StageEngine, StageInput, StageOutput

CONTEXT = 512


class Stages:
    """Stages of one checkpoint. A stage serves every ring that it is part of."""

    def __init__(self, provider: EngineProvider, model_dir: Path, num_layers: int, **options: str) -> None:
        self._provider, self._model_dir = provider, model_dir
        self._num_layers, self._options = num_layers, options
        self._loaded: dict[tuple[int, int], StageEngine] = {}

    def ring(self, cuts: Sequence[int]) -> list[StageEngine]:
        """Returns the stages of the model when it is cut before these layers."""
        return [self._stage(*bounds) for bounds in zip((0, *cuts), (*cuts, self._num_layers), strict=True)]

    def all(self) -> list[StageEngine]:
        """Returns every stage of all rings so far."""
        return list(self._loaded.values())

    def close(self) -> None:
        for stage in self._loaded.values():
            stage.close()
        self._loaded.clear()

    def _stage(self, start: int, stop: int) -> StageEngine:
        if (start, stop) not in self._loaded:
            stage = self._provider.create()
            request = LoadRequest(Shard("tiny", start, stop, self._num_layers), self._model_dir, CONTEXT, self._options)
            stage.load(request, lambda done, total: None)
            self._loaded[start, stop] = stage
        return self._loaded[start, stop]


def forward(ring: Sequence[StageEngine], rows: Sequence[Row], token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns logits `[sum(num_logits), vocab]` of one frame. Raises RuntimeError if a stage faults a row."""
    logits = _passed(ring, rows, token_ids).logits
    if logits is None:
        raise RuntimeError("the last stage gives no logits")
    return logits


def final_states(ring: Sequence[StageEngine], rows: Sequence[Row], token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the final hidden states `[sum(num_hidden), width]` of one frame. Raises RuntimeError as `forward`."""
    hidden = _passed(ring, rows, token_ids).hidden
    if hidden is None:
        raise RuntimeError("the last stage gives no hidden states")
    return hidden


def _passed(ring: Sequence[StageEngine], rows: Sequence[Row], token_ids: Sequence[int] | np.ndarray) -> StageOutput:
    """Passes one frame through the ring; returns the output of the last stage."""
    output = StageOutput()
    for stage in ring:
        output = stage.forward(StageInput(tuple(rows), tuple(map(int, token_ids)), dict(output.tensors)))
        if output.faults:
            raise RuntimeError(f"fault: {output.faults[0].message}")
    return output


def insert(ring: Sequence[StageEngine], sequences: Iterable[int], max_tokens: int = CONTEXT) -> None:
    """Begins sequences on every stage."""
    for sequence in sequences:
        for stage in ring:
            stage.insert(sequence, max_tokens)


def remove(ring: Sequence[StageEngine], sequences: Iterable[int]) -> None:
    """Ends sequences on every stage."""
    for sequence in sequences:
        for stage in ring:
            stage.remove(sequence)
