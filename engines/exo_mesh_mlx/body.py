"""The part of mlx-lm's models that ends after the last norm, and checkpoints that have only that part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_PLACES = (("model",), ("language_model", "model"), ("transformer",), ("backbone",))
"""Attributes under which mlx-lm's models keep that part."""


def find_body(model: nn.Module) -> Any:
    """The part of the model that makes final hidden states of token ids and a cache; None if it has no such part of its
    own."""
    for place in _PLACES:
        found: Any = model
        for name in place:
            found = getattr(found, name, None)
        if isinstance(found, nn.Module) and hasattr(found, "layers"):
            return found
    return None


def lacks_prefix(names: Iterable[str]) -> bool:
    """Whether a checkpoint names its tensors as the body does, without the prefix `model.`: it has no head."""
    names = list(names)
    return any(name.startswith("layers.") for name in names) and not any(name.startswith("model.") for name in names)


def with_prefix(model_class: type) -> type:
    """The class of a model that takes the tensors of such a checkpoint."""

    class Prefixed(model_class):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            full = {f"model.{name}": array for name, array in weights.items()}
            sanitize = getattr(super(), "sanitize", None)
            return full if sanitize is None else dict(sanitize(full))

    Prefixed.__name__ = model_class.__name__
    return Prefixed
