"""Arguments of a model's and of its layers' forwards: the cache, and the hidden state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from exo_mesh.errors import ModelError
from exo_mesh_torch.caches import StageCache

CACHE_ARGUMENTS = ("past_key_values", "cache_params")
"""What model classes call their cache."""


def cache_argument(model: nn.Module) -> str:
    """What the model's forward calls its cache. Raises ModelError if it takes none that we know."""
    parameters = inspect.signature(model.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise ModelError(
        f"the torch engine cannot run {type(model).__name__}: its forward takes no cache "
        f"({' or '.join(CACHE_ARGUMENTS)})"
    )


def call_arguments(model: nn.Module, cache: StageCache, **others: Any) -> dict[str, Any]:
    """Arguments of a forward: those of `others` that the model takes."""
    taken = inspect.signature(model.forward).parameters
    arguments = {name: value for name, value in others.items() if name in taken}
    return {cache_argument(model): cache, "use_cache": True, **arguments}


def get_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden state among a layer's arguments: the first tensor of three or more axes."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim >= 3 and value.is_floating_point():
            return value
    raise ModelError("a layer is called without a hidden state")


def put_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], new: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another hidden state."""
    old = get_hidden(args, kwargs)
    return (
        tuple(new if value is old else value for value in args),
        {name: new if value is old else value for name, value in kwargs.items()},
    )
