"""Converts the KV of one sequence to bytes and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.errors import EngineError
from exo_mesh_torch import wire
from exo_mesh_torch.caches import ForeignLayer, StageCache
from exo_mesh_torch.kv import KvLayer

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""dtype and shape of each tensor of a saved sequence; of keys and values `[heads, width]`, without the positions."""


def save(cache: StageCache, layers: range, length: int) -> SavedSequence:
    """Copies of the layers' KV. cache: of one row."""
    tensors: dict[str, Tensor] = {}
    for part in save_parts(lambda: cache, layers, length):
        tensors |= part.tensors
    return SavedSequence(length, tensors)


def save_parts(find: Callable[[], StageCache], layers: range, length: int) -> Iterator[SavedSequence]:
    """What `save` copies, one layer after the other. find: the cache of one row, asked again for each layer."""
    if not length:
        yield SavedSequence(0, {})
        return
    cache = find()
    if any(isinstance(cache.layers[index], ForeignLayer) for index in layers):
        raise EngineError("this model has a kind of KV that cannot be saved")
    for index in layers:
        with torch.inference_mode():
            state = find().layers[index].state()
            tensors = {f"{index}.{name}": wire.to_tensor(tensor.clone()) for name, tensor in state.items()}
        yield SavedSequence(length, tensors)


def shapes(cache: StageCache, layers: range) -> Shapes:
    """The form of `save`'s result for a cache that has been used."""
    return {
        f"{index}.{name}": (tensor.dtype, _fixed_shape(name, tuple(tensor.shape)))
        for index in layers
        if not isinstance(cache.layers[index], ForeignLayer)
        for name, tensor in cache.layers[index].state().items()
    }


def restore(
    cache: StageCache, layers: range, saved: SavedSequence, expected: Shapes, device: torch.device
) -> StageCache:
    """Fill an empty cache. Raises EngineError if the tensors do not belong to this stage."""
    if saved.length < 0 or (not saved.length and saved.tensors):
        raise EngineError(f"a saved sequence of {saved.length} positions has {len(saved.tensors)} tensors")
    if not saved.length:
        return cache
    if set(saved.tensors) != set(expected):
        odd = sorted(set(saved.tensors) ^ set(expected))
        raise EngineError(f"the saved sequence is of another stage: {odd[0]} is in only one of the two")
    for index in layers:
        layer = cache.layers[index]
        prefix = f"{index}."
        state: dict[str, torch.Tensor] = {}
        for name, tensor in saved.tensors.items():
            if name.startswith(prefix):
                dtype, shape = expected[name]
                leaf = name.removeprefix(prefix)
                kept = tensor.shape[1] if isinstance(layer, KvLayer) and len(tensor.shape) == 3 else 0
                if (tensor.dtype, _fixed_shape(leaf, tensor.shape)) != (wire.dtype_name(dtype), shape):
                    raise EngineError(
                        f"saved {name} is {tensor.dtype}{list(tensor.shape)}, which does not fit this stage"
                    )
                if leaf in ("keys", "values") and not _kept_enough(layer, saved.length, kept):
                    raise EngineError(f"saved {name} has {kept} positions of {saved.length}")
                state[leaf] = wire.from_tensor(tensor, device, borrows=True)  # `set_state` copies
        layer.set_state(saved.length, state)
    cache.skip([index for index in range(len(cache.layers)) if index not in layers], saved.length)
    return cache


def _kept_enough(layer: KvLayer, length: int, kept: int) -> bool:
    needed = length if layer.window is None else min(length, layer.window - 1)
    return needed <= kept <= length


def _fixed_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without the axis of positions."""
    return (shape[0], *shape[2:]) if name in ("keys", "values") and len(shape) == 3 else shape
