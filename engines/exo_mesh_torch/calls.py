"""Arguments of the forwards of a model and its layers: the cache, and the hidden state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from exo_mesh.errors import ModelError
from exo_mesh_torch.caches import StageCache

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument in model classes: transformers 5.24 renamed the others to the first."""


def find_cache_argument(function: Callable[..., Any]) -> str | None:
    """The name of the cache argument of a function of transformers, None if it takes no cache."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def cache_argument(model: nn.Module) -> str:
    """The name of the cache argument of the model's forward. Raises ModelError if it has no known one."""
    name = find_cache_argument(model.forward)
    if name is not None:
        return name
    raise ModelError(
        f"the torch engine cannot run {type(model).__name__}: its forward takes no cache "
        f"({' or '.join(CACHE_ARGUMENTS)})"
    )


def call_arguments(model: nn.Module, cache: StageCache, **others: Any) -> dict[str, Any]:
    """Arguments of a forward: the cache, and the arguments in `others` that the model takes."""
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
