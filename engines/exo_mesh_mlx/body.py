"""Finds the part of one of mlx-lm's models that ends after the last norm: all but the head."""

from __future__ import annotations

from typing import Any

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
