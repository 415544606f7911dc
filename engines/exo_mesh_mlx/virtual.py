"""Stand-ins for the tensors of other stages whose files are not here, so that mlx-lm can arrange the names of the rest.

Model code stacks, splits and renames tensors of all layers at once. A missing tensor gets zeros of the shape that the
same tensor has in another layer; they are lazy and take no memory. Tensors that no other layer has are left out.
Neither is ever read: the loader makes sure of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from exo_mesh.weights.card import LAYER_NAME, layer_of
from exo_mesh_mlx.checkpoint import MlxCheckpoint


class VirtualTensors:
    """Makes the stand-ins of a checkpoint. zeros: {tensor: stand-in}."""

    def __init__(self, checkpoint: MlxCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.zeros: dict[str, mx.array] = {}
        self._given: set[str] = set()

    def completing(self, model_class: type) -> type:
        """A subclass whose `sanitize` gets the stand-ins too."""
        original = getattr(model_class, "sanitize", None)
        completed = self._complete

        def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = completed(weights)
            weights = original(model, weights) if original is not None else weights
            self._given = set(weights)
            return weights

        # code that looks up a module's own file must find mlx-lm's
        return type(model_class.__name__, (model_class,), {"sanitize": sanitize, "__module__": model_class.__module__})

    def missing(self, parameters: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """A model's parameters that got a value neither from a file nor from a stand-in: they are random."""
        return {name: array for name, array in parameters.items() if name not in self._given}

    def _complete(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        by_shape = {_anonymous(name): array for name, array in weights.items()}
        incomplete: set[int | None] = set()
        for name in self._checkpoint.absent:
            like = by_shape.get(_anonymous(name))
            if like is not None and layer_of(name) is not None:
                self.zeros[name] = mx.zeros(like.shape, like.dtype)
            else:
                incomplete.add(layer_of(name))
        incomplete.discard(None)
        self.zeros = {name: array for name, array in self.zeros.items() if layer_of(name) not in incomplete}
        return {name: array for name, array in (weights | self.zeros).items() if layer_of(name) not in incomplete}


def _anonymous(name: str) -> str:
    """The name without the number of its layer."""
    found = LAYER_NAME.search(name)
    return name if found is None else name[: found.start(1)] + "#" + name[found.end(1) :]
