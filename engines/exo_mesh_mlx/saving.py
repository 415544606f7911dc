"""Copies a sequence's caches out as named tensors, and in again: arrays, and the counters that describe them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_caches

from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.errors import EngineError
from exo_mesh_mlx import wire
from exo_mesh_mlx.caches import SequenceCache
from exo_mesh_mlx.shared.parts import PartedKVCache

SavedForm = dict[str, tuple[str, tuple[int | None, ...]]]
"""{tensor name: (dtype, shape)} of a stage's saved sequences; None for the axis that counts positions."""

_CONSTANTS = ("max_size", "keep", "chunk_size", "window_size")
"""Counters that belong to the model, not to the sequence."""


def save(cache: SequenceCache) -> SavedSequence:
    """The complete state that the stage holds for a sequence, which leaves its block if it is in one."""
    counters, arrays = _held(cache)
    mx.eval(arrays)
    return SavedSequence(cache.length, counters | {name: wire.to_tensor(array) for name, array in arrays.items()})


def save_parts(cache: SequenceCache) -> Iterator[SavedSequence]:
    """What `save` copies, one array after the other, as it was at the first part: arrays do not change."""
    length = cache.length
    counters, arrays = _held(cache)
    yield SavedSequence(length, counters)
    for name in list(arrays):
        array = arrays.pop(name)
        mx.eval(array)
        yield SavedSequence(length, {name: wire.to_tensor(array)})


def _held(cache: SequenceCache) -> tuple[dict[str, Tensor], dict[str, mx.array]]:
    """The counters, and the arrays, which may not have been computed yet."""
    cache.settle()
    entries = {slot: e.plain() if isinstance(e, PartedKVCache) else e for slot, e in cache.entries.items()}
    leaves = {name: leaf for slot, entry in entries.items() for name, leaf in _leaves(entry, str(slot))}
    counters = {
        name: Tensor.from_numpy(np.asarray([leaf], np.int64)) for name, leaf in leaves.items() if isinstance(leaf, int)
    }
    return counters, {name: leaf for name, leaf in leaves.items() if isinstance(leaf, mx.array)}


def restore(cache: SequenceCache, saved: SavedSequence, form: SavedForm) -> SequenceCache:
    """Fill a fresh cache and return it. Raises EngineError if the saved sequence is of another stage."""
    if not saved.length:
        return cache
    leaves = (leaf for slot, entry in cache.entries.items() for leaf in _leaves(entry, str(slot)))
    counters = [name for name, leaf in leaves if isinstance(leaf, int)]
    later = {name for slot, entry in cache.entries.items() for name in _unset(entry, str(slot))}
    _check(saved, {**form, **dict.fromkeys(counters, ("int64", (1,)))}, later)
    for slot, entry in cache.entries.items():
        _fill(entry, str(slot), saved.tensors)
        offset = getattr(entry, "offset", saved.length)
        if offset != saved.length:
            raise EngineError(f"cache entry {slot} was saved with {offset} positions, the sequence with {saved.length}")
    cache.length = saved.length
    return cache


def form_of(cache: SequenceCache) -> SavedForm:
    """The form of this stage's saved sequences, from a cache after a forward."""
    form: SavedForm = {}
    for slot, entry in cache.entries.items():
        for name, leaf in _leaves(entry, str(slot)):
            if isinstance(leaf, mx.array):
                form[name] = (wire.dtype_name(leaf.dtype), _shape_form(entry, leaf))
    return form


def _shape_form(entry: Any, array: mx.array) -> tuple[int | None, ...]:
    """The shape with None for positions. A recurrent state has one size; in other arrays the last axis but one counts
    positions, in arrays of token ids the last one."""
    if array.ndim < 3:
        return (*array.shape[:-1], None)
    if isinstance(entry, mlx_caches.ArraysCache):
        return tuple(array.shape)
    return (*array.shape[:-2], None, array.shape[-1])


def _check(saved: SavedSequence, form: SavedForm, later: Collection[str]) -> None:
    """Raises EngineError for tensors of another stage. later: names that a fresh cache has a place for, and that the
    cache of a single token may still lack; their shapes are not known."""
    for name, (dtype, shape) in form.items():
        tensor = saved.tensors.get(name)
        if tensor is None:
            raise EngineError(
                f"the saved sequence lacks tensor {json.dumps(name)}; it has {json.dumps(sorted(saved.tensors))}"
            )
        fits = len(tensor.shape) == len(shape) and all(
            want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            raise EngineError(
                f"saved tensor {json.dumps(name)} is {tensor.dtype}{list(tensor.shape)}, "
                f"this stage has {dtype}{json.dumps(shape)}"
            )
    if surplus := sorted(saved.tensors.keys() - form.keys() - set(later)):
        raise EngineError(
            f"saved tensor {json.dumps(surplus[0])} is of another stage: this one has {json.dumps(sorted(form))}"
        )


def _leaves(entry: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(name, array or counter) of everything that an entry holds; of keys and values only the positions in use."""
    for name, value in vars(entry).items():
        path = f"{prefix}.{name}"
        if isinstance(value, list | tuple):
            for i, item in enumerate(value):
                if hasattr(item, "__dict__"):
                    yield from _leaves(item, f"{path}.{i}")
                elif item is not None:
                    yield f"{path}.{i}", item
        elif type(entry) is mlx_caches.KVCache and isinstance(value, mx.array):
            yield path, value[..., : entry.offset, :]
        elif isinstance(value, mx.array | int):
            yield path, value


def _unset(entry: Any, prefix: str) -> Iterator[str]:
    """Names of the arrays that an entry does not have yet."""
    for name, value in vars(entry).items():
        path = f"{prefix}.{name}"
        if value is None:
            yield path
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                if hasattr(item, "__dict__"):
                    yield from _unset(item, f"{path}.{i}")


def _fill(entry: Any, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """Set every array and counter of a fresh entry that was saved."""
    for name, value in list(vars(entry).items()):
        path = f"{prefix}.{name}"
        if isinstance(value, list | tuple):
            items = [_filled(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
            setattr(entry, name, type(value)(items))
        else:
            setattr(entry, name, _filled(value, path, tensors))


def _filled(value: Any, path: str, tensors: Mapping[str, Tensor]) -> Any:
    if hasattr(value, "__dict__"):
        _fill(value, path, tensors)
        return value
    tensor = tensors.get(path)
    if tensor is None:
        return value
    if isinstance(value, int):
        counter = int(tensor.numpy().reshape(-1)[0]) if tensor.num_bytes else value
        if path.rpartition(".")[2] in _CONSTANTS and counter != value:
            raise EngineError(f"saved {json.dumps(path)} is {counter}, this stage has {value}")
        return counter
    return wire.from_tensor(tensor)
