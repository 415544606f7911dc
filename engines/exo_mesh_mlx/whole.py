"""All layers on one stage, for models whose forward pass cannot be cut (layers called twice, or not at all)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from exo_mesh_mlx.body import find_body
from exo_mesh_mlx.caches import CacheLayout
from exo_mesh_mlx.ghost import Packet
from exo_mesh_mlx.trace import LiveValue


class WholeStage:
    """A stage with the interface of GhostStage; the model is not hooked."""

    inputs: tuple[LiveValue, ...] = ()
    outputs: tuple[LiveValue, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._body = find_body(model)

    def forward(self, tokens: mx.array, caches: list[Any], packet: Packet, num_logits: int) -> mx.array | Packet:
        """Logits `[rows, n, vocab]`, lazily, whatever num_logits is."""
        logits: mx.array = self._model(tokens, cache=caches)
        return logits

    def final_states(self, tokens: mx.array, caches: list[Any], packet: Packet) -> mx.array | None:
        """See GhostStage."""
        states = None if self._body is None else self._body(tokens, cache=caches)
        return states if isinstance(states, mx.array) and states.ndim == 3 else None

    def close(self) -> None:
        """Do nothing: there are no hooks."""


def whole_layout(full: list[Any]) -> CacheLayout:
    """The layout in which every entry stands for itself."""
    return CacheLayout(tuple(range(len(full))), ())
