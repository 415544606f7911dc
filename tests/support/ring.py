"""Stages of one model in one process, called one after the other as frames would go round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import EngineProvider, LoadRequest, StageEngine, StageInput


class Ring:
    """Loads one stage per layer range. `forward` fails the test on any fault."""

    def __init__(
        self, provider: EngineProvider, model_dir: Path, num_layers: int, cuts: Sequence[int], **options: str
    ) -> None:
        self.stages: list[StageEngine] = []
        for start, stop in zip([0, *cuts], [*cuts, num_layers], strict=True):
            stage = provider.create()
            shard = Shard("tiny", start, stop, num_layers)
            stage.load(LoadRequest(shard, model_dir, 512, options), lambda done, total: None)
            self.stages.append(stage)

    def insert(self, *sequences: int, max_tokens: int = 128) -> None:
        for stage in self.stages:
            for sequence in sequences:
                stage.insert(sequence, max_tokens)

    def remove(self, *sequences: int) -> None:
        for stage in self.stages:
            for sequence in sequences:
                stage.remove(sequence)

    def forward(self, rows: Sequence[Row], token_ids: np.ndarray) -> np.ndarray:
        """Logits `[sum(num_logits), vocab]`."""
        tensors: dict[str, Tensor] = {}
        for stage in self.stages:
            output = stage.forward(StageInput(tuple(rows), tuple(token_ids.tolist()), tensors))
            assert not output.faults
            tensors = dict(output.tensors)
        assert output.logits is not None
        return output.logits

    def close(self) -> None:
        for stage in self.stages:
            stage.close()
