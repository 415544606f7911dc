"""Presents caches of several sequences as one cache with a batch axis: matrices are multiplied for all rows at once,
while each row attends to its own keys and values in place.

Nothing is padded, merged or copied, so sequences may join and leave at every frame, and a row attends exactly as it
does alone. Values that differ from row to row are passed to model code as opaque objects that only attention and rotary
embeddings understand. Code that computes with them by itself raises. Some of it computes with offsets only, and works
with an array of them, as mlx-lm's own batch caches have; otherwise the stage computes row by row.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_caches

from exo_mesh_mlx.hooks import LayerCall, hook, set_class

_ATTENTION = "scaled_dot_product_attention"
_SETTINGS = ("max_size", "keep", "chunk_size", "step")
"""Settings that entries of one kind have in common."""


class Ragged:
    """One array (or mask) per row; they differ in length."""

    __slots__ = ("rows",)

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows


class Offsets:
    """The number of positions in each row's cache, if they differ: int32 `[rows]`."""

    __slots__ = ("rows",)

    def __init__(self, offsets: list[int]) -> None:
        self.rows = offsets

    @property
    def array(self) -> mx.array:
        return as_array(self.rows)


OffsetsAs = Callable[[list[int]], Any]
"""The form in which model code gets differing offsets: `Offsets`, with which it cannot compute, or `as_array`."""


def as_array(offsets: list[int]) -> mx.array:
    """int32 `[rows]`, as in the batch caches of mlx-lm."""
    return mx.array(offsets, mx.int32)


class RaggedKv:
    """Caches of keys and values, `[1, heads, length, width]` each."""

    def __init__(self, entries: Sequence[Any], offsets_as: OffsetsAs) -> None:
        self.entries = entries
        self._offsets_as = offsets_as

    @property
    def offset(self) -> Any:
        offsets = [entry.offset for entry in self.entries]
        return offsets[0] if min(offsets) == max(offsets) else self._offsets_as(offsets)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        fetched = [
            entry.update_and_fetch(keys[row : row + 1], values[row : row + 1]) for row, entry in enumerate(self.entries)
        ]
        return Ragged([pair[0] for pair in fetched]), Ragged([pair[1] for pair in fetched])

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        masks = [entry.make_mask(*args, **kwargs) for entry in self.entries]
        plain = masks[0] is None or isinstance(masks[0], str)
        return masks[0] if plain and all(mask is masks[0] for mask in masks) else Ragged(masks)

    def maybe_trim_front(self) -> None:
        for entry in self.entries:
            entry.maybe_trim_front()

    def empty(self) -> bool:
        return all(entry.empty() for entry in self.entries)

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            return getattr(self.entries[0], name)
        raise AttributeError(f"{name} differs from row to row")


class RaggedStates:
    """Caches of arrays that do not grow, each `[1, ...]` (recurrent state, convolution tails)."""

    def __init__(self, entries: Sequence[Any], offsets_as: OffsetsAs) -> None:
        self.entries = entries

    def __getitem__(self, index: int) -> Any:
        arrays = [entry[index] for entry in self.entries]
        return None if all(array is None for array in arrays) else mx.concatenate(arrays)

    def __setitem__(self, index: int, value: mx.array) -> None:
        for row, entry in enumerate(self.entries):
            entry[index] = value[row : row + 1]

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        if any(entry.make_mask(*args, **kwargs) is not None for entry in self.entries):
            raise ValueError("a state with a mask has no batch axis")

    def advance(self, num_tokens: int) -> None:
        for entry in self.entries:
            entry.advance(num_tokens)

    def empty(self) -> bool:
        return all(entry.empty() for entry in self.entries)

    def __getattr__(self, name: str) -> Any:
        values = [getattr(entry, name) for entry in self.entries]
        if name in ("lengths", "left_padding") and all(value is None for value in values):
            return None
        raise AttributeError(f"{name} differs from row to row")


class RaggedList:
    """Cache entries of several parts."""

    def __init__(self, entries: Sequence[Any], offsets_as: OffsetsAs) -> None:
        self.entries = entries
        self.caches = [ragged(parts, offsets_as) for parts in zip(*(entry.caches for entry in entries), strict=True)]

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]


_VIEW_OF: dict[type, type] = {
    mlx_caches.KVCache: RaggedKv,
    mlx_caches.RotatingKVCache: RaggedKv,
    mlx_caches.ChunkedKVCache: RaggedKv,
    mlx_caches.ConcatenateKVCache: RaggedKv,
    mlx_caches.ArraysCache: RaggedStates,
    mlx_caches.CacheList: RaggedList,
}
# subclasses of the caches they stand for, because model code may check by isinstance
_VIEWS: dict[type, Any] = {kind: type(f"Ragged{kind.__name__}", (view, kind), {}) for kind, view in _VIEW_OF.items()}


def ragged(entries: Sequence[Any], offsets_as: OffsetsAs = Offsets) -> Any:
    """One cache for entries of one kind, one per row. Raises TypeError for a kind without such a view."""
    kind = type(entries[0])
    if kind not in _VIEWS:
        raise TypeError(f"no view of several {kind.__name__}")
    return _VIEWS[kind](entries, offsets_as)


class RaggedMode:
    """Hooks in a model that understand ragged caches; when the mode is off, the modules run as they are."""

    def __init__(self, hooked: Iterable[tuple[nn.Module, LayerCall]], offsets_as: OffsetsAs) -> None:
        self.offsets_as = offsets_as
        self._classes: list[tuple[nn.Module, type, type]] = []
        for module, call in hooked:
            plain = type(module)
            hook(module, call)
            self._classes.append((module, plain, type(module)))
        self._on = True

    def switch(self, on: bool) -> None:
        if on == self._on:
            return
        for module, plain, hooked in self._classes:
            set_class(module, hooked if on else plain)
        self._on = on


def attention_by_row(model: nn.Module, offsets_as: OffsetsAs = Offsets) -> RaggedMode:
    """A mode in which only attention itself runs row by row, and rotary embeddings get an offset per row."""
    for name in {type(module).__module__ for module in model.modules()}:
        original = getattr(sys.modules.get(name), _ATTENTION, None)
        if original is not None and not hasattr(original, "knows_ragged"):
            setattr(sys.modules[name], _ATTENTION, _attend_by_row(original))
    rotary = [module for module in model.modules() if re.search("rope|rotary", type(module).__name__.lower())]
    return RaggedMode(((module, _rotate_by_row) for module in rotary), offsets_as)


def mixers_by_row(model: nn.Module, offsets_as: OffsetsAs = Offsets) -> RaggedMode:
    """A mode in which the parts of a layer that get a cache run row by row, with their projections; the others do
    not."""
    parts = [
        module for layer in model.layers for _, module in tree_flatten(layer.children(), is_leaf=nn.Module.is_module)
    ]
    return RaggedMode(((module, _mix_by_row) for module in parts), offsets_as)


def _attend_by_row(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any) -> mx.array:
        if not isinstance(keys, Ragged):
            return original(queries, keys, values, *args, **kwargs)
        rows = []
        for row, (row_keys, row_values) in enumerate(zip(keys.rows, values.rows, strict=True)):
            row_args = [_of_row(arg, row) for arg in args]
            row_kwargs = {name: _of_row(arg, row) for name, arg in kwargs.items()}
            rows.append(original(queries[row : row + 1], row_keys, row_values, *row_args, **row_kwargs))
        return mx.concatenate(rows)

    attention.knows_ragged = True  # type: ignore[attr-defined]
    return attention


def _of_row(value: Any, row: int) -> Any:
    """A row's own mask. Raises TypeError for a mask that model code made for all rows alike, because it may be
    wrong."""
    if isinstance(value, Ragged):
        return value.rows[row]
    if isinstance(value, mx.array) and value.ndim > 1:
        raise TypeError("a mask that was not made by the caches")
    return value


def _rotate_by_row(original: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(kwargs.get("offset"), Offsets):
        kwargs = {**kwargs, "offset": kwargs["offset"].array}
    elif args and isinstance(args[-1], Offsets):
        args = (*args[:-1], args[-1].array)
    return original(layer, *args, **kwargs)


def _mix_by_row(original: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    num_rows = next((n for n in map(_num_rows, (*args, *kwargs.values())) if n), 0)
    if not num_rows:
        return original(module, *args, **kwargs)
    return _joined(
        [
            original(
                module,
                *(_row_of(arg, row, num_rows) for arg in args),
                **{name: _row_of(arg, row, num_rows) for name, arg in kwargs.items()},
            )
            for row in range(num_rows)
        ]
    )


def _num_rows(value: Any) -> int:
    """The number of rows of an argument, 0 for one that is not ragged."""
    if isinstance(value, RaggedKv | RaggedStates | RaggedList):
        return len(value.entries)
    if isinstance(value, Ragged | Offsets):
        return len(value.rows)
    if isinstance(value, tuple | list):
        return next((n for n in map(_num_rows, value) if n), 0)
    return 0


def _row_of(value: Any, row: int, num_rows: int) -> Any:
    """One row's part of an argument. Raises TypeError for an array whose rows cannot be told apart."""
    if isinstance(value, RaggedKv | RaggedStates | RaggedList):
        return value.entries[row]
    if isinstance(value, Ragged | Offsets):
        return value.rows[row]
    if isinstance(value, tuple | list):
        return type(value)(_row_of(item, row, num_rows) for item in value)
    if isinstance(value, mx.array):
        if value.ndim < 3 or value.shape[0] != num_rows:
            raise TypeError("an array without a batch axis")
        return value[row : row + 1]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} for all rows")


def _joined(rows: list[Any]) -> Any:
    """One result from the results of the rows: with a batch axis if they are alike, else ragged."""
    first = rows[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(items)) for items in zip(*rows, strict=True))
    if isinstance(first, mx.array):
        alike = first.ndim >= 3 and all(row.shape == first.shape for row in rows)
        return mx.concatenate(rows) if alike else Ragged(rows)
    if all(row is None for row in rows):
        return None
    raise TypeError(f"a {type(first).__name__} from each row")
