"""Stages of one model in one process, called one after the other as frames would go round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import EngineProvider
from tools.stages import Stages, final_states, forward, insert, remove


class Ring:
    """Loads one stage per layer range. `forward` fails the test on any fault."""

    def __init__(
        self, provider: EngineProvider, model_dir: Path, num_layers: int, cuts: Sequence[int], **options: str
    ) -> None:
        self.stages = Stages(provider, model_dir, num_layers, **options).ring(cuts)

    def insert(self, *sequences: int, max_tokens: int = 128) -> None:
        insert(self.stages, sequences, max_tokens)

    def remove(self, *sequences: int) -> None:
        remove(self.stages, sequences)

    def forward(self, rows: Sequence[Row], token_ids: np.ndarray) -> np.ndarray:
        """Logits `[sum(num_logits), vocab]`."""
        return forward(self.stages, rows, token_ids)

    def final_states(self, rows: Sequence[Row], token_ids: np.ndarray) -> np.ndarray:
        """Final hidden states `[sum(num_hidden), width]`."""
        return final_states(self.stages, rows, token_ids)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()
