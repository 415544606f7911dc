"""Token ids as the input of a stage of all layers: the library looks up the embedding, sharing it with the head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exo_mesh_llamacpp.context import MAX_TOKENS, LlamaContext, StageShape
from exo_mesh_llamacpp.model import LoadedModel


class TokenIds:
    """Takes the place of the embedding: remembers the ids of the next pass."""

    num_bytes = 0

    def __init__(self, hidden: int) -> None:
        self._nothing = np.zeros((MAX_TOKENS, hidden), np.float32)
        self.ids = np.zeros(MAX_TOKENS, np.int32)

    def rows(self, token_ids: Sequence[int]) -> np.ndarray:
        """Zeros, which the library does not read."""
        self.ids[: len(token_ids)] = token_ids
        return self._nothing[: len(token_ids)]


class TokenContext(LlamaContext):
    """A context that computes from token ids."""

    def __init__(
        self, model: LoadedModel, shape: StageShape, slots: int, cells: int, tokens: TokenIds, *, shared: bool = False
    ) -> None:
        super().__init__(model, shape, slots, cells, shared=shared)
        self._batch.embd = None
        self._batch.token = tokens.ids.ctypes.data
        self._batch.pos, self._axes = self.positions.ctypes.data, False  # the library adds the other axes itself
