"""Presents caches of several sequences as one cache with a batch axis: matrices are multiplied for all rows at once,
while rows attend in pieces: all rows of a block in one (`blocks.py`), each other row to its own keys and values in
place.

Sequences may join and leave at every frame. A row that is a piece of its own attends exactly as it does alone. Values
that differ from row to row are passed to model code as opaque objects that only attention and rotary
embeddings understand. Code that computes with them by itself raises. Some of it computes with offsets only, and works
with an array of them, as mlx-lm's own batch caches have; otherwise the stage computes row by row.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_caches

from exo_mesh_mlx.hooks import LayerCall, hook, set_class
from exo_mesh_mlx.kv import ChunkKVCache, WindowKVCache
from exo_mesh_mlx.shared.blocks import BlockRows
from exo_mesh_mlx.shared.parts import MOST_DIRECT_TOKENS, MlxKvPart, PartedKVCache, attend, own_mask

_ATTENTION = "scaled_dot_product_attention"
_SETTINGS = ("max_size", "keep", "chunk_size", "step")
"""Settings that entries of one kind have in common."""


class Ragged:
    """One array (or mask) per piece of rows; they differ in length. sizes: the number of rows of each piece, by default
    1. own_masks: of keys, the mask of each piece if None and "causal" are wrong for it, else None.
    parts: of keys, the shared positions before those of each piece."""

    __slots__ = ("own_masks", "parts", "pieces", "sizes")

    def __init__(
        self,
        pieces: list[Any],
        sizes: list[int] | None = None,
        own_masks: list[Any] | None = None,
        parts: list[tuple[MlxKvPart, ...]] | None = None,
    ) -> None:
        self.pieces, self.sizes = pieces, sizes or [1] * len(pieces)
        self.own_masks = own_masks or [None] * len(pieces)
        self.parts = parts or [()] * len(pieces)

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)


class Offsets:
    """The number of positions in each row's cache, if they differ: int32 `[rows]`."""

    __slots__ = ("array", "rows")

    def __init__(self, offsets: list[int]) -> None:
        self.rows = offsets
        self.array = as_array(offsets)


OffsetsAs = Callable[[list[int]], Any]
"""The form in which model code gets differing offsets: `Offsets`, with which it cannot compute, or `as_array`."""


def as_array(offsets: list[int]) -> mx.array:
    """int32 `[rows]`, as in the batch caches of mlx-lm."""
    return mx.array(offsets, mx.int32)


def once_each(offsets_as: OffsetsAs) -> OffsetsAs:
    """The same, but equal offsets get one object: all layers of a forward ask for the same ones."""
    made: dict[tuple[int, ...], Any] = {}

    def remembered(offsets: list[int]) -> Any:
        key = tuple(offsets)
        if key not in made:
            made[key] = offsets_as(offsets)
        return made[key]

    return remembered


class RaggedKv:
    """Caches of keys and values, `[1, heads, length, width]` each, and rows of blocks."""

    def __init__(self, entries: Sequence[Any], offsets_as: OffsetsAs) -> None:
        self.entries = entries
        self._offsets_as = offsets_as
        self._sizes = [size for entry in entries for size in (entry.sizes if isinstance(entry, BlockRows) else (1,))]

    @property
    def offset(self) -> Any:
        offsets: list[int] = []
        for entry in self.entries:
            if isinstance(entry, BlockRows):
                offsets += entry.offsets
            else:
                offsets.append(entry.offset)
        return offsets[0] if min(offsets) == max(offsets) else self._offsets_as(offsets)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        fetched: list[tuple[mx.array, mx.array]] = []
        masks: list[Any] = []
        parts: list[tuple[MlxKvPart, ...]] = []
        begin = 0
        for entry in self.entries:
            if isinstance(entry, BlockRows):
                stop = begin + sum(entry.sizes)
                fetched += entry.fetch(_rows_of(keys, begin, stop), _rows_of(values, begin, stop))
                masks += entry.own_masks
                parts += entry.parts
            else:
                stop = begin + 1
                direct = isinstance(entry, PartedKVCache) and keys.shape[2] <= MOST_DIRECT_TOKENS
                fetch = entry.append if direct else entry.update_and_fetch
                fetched.append(fetch(keys[begin:stop], values[begin:stop]))
                parts.append(entry.parts if direct else ())
                masks.append(own_mask(keys.shape[2], fetched[-1][0].shape[2]) if parts[-1] else None)
            begin = stop
        sizes = self._sizes
        return Ragged([pair[0] for pair in fetched], sizes, masks, parts), Ragged([pair[1] for pair in fetched], sizes)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        masks: list[Any] = []
        for entry in self.entries:
            masks += (
                entry.masks(*args, **kwargs) if isinstance(entry, BlockRows) else [entry.make_mask(*args, **kwargs)]
            )
        plain = masks[0] is None or isinstance(masks[0], str)
        return masks[0] if plain and all(mask is masks[0] for mask in masks) else Ragged(masks, self._sizes)

    def maybe_trim_front(self) -> None:
        for entry in self.entries:
            entry.maybe_trim_front()

    def empty(self) -> bool:
        return all(not isinstance(entry, BlockRows) and entry.empty() for entry in self.entries)

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
_STANDS_FOR: dict[type, type] = {
    BlockRows: mlx_caches.KVCache,
    PartedKVCache: mlx_caches.KVCache,
    WindowKVCache: mlx_caches.RotatingKVCache,
    ChunkKVCache: mlx_caches.ChunkedKVCache,
}
# subclasses of the caches they stand for, because model code may check by isinstance
_VIEWS: dict[type, Any] = {kind: type(f"Ragged{kind.__name__}", (view, kind), {}) for kind, view in _VIEW_OF.items()}


def ragged(entries: Sequence[Any], offsets_as: OffsetsAs = Offsets) -> Any:
    """One cache for entries of one kind, one per row, and rows of blocks. Raises TypeError for a kind without such a
    view."""
    kind = _STANDS_FOR.get(type(entries[0]), type(entries[0]))
    if kind not in _VIEWS:
        raise TypeError(f"no view of several {kind.__name__}")
    return _VIEWS[kind](entries, offsets_as)


class RaggedMode:
    """Hooks in a model that understand ragged caches; when the mode is off, the modules run as they are."""

    def __init__(
        self, hooked: Iterable[tuple[nn.Module, LayerCall]], offsets_as: OffsetsAs, *, takes_blocks: bool
    ) -> None:
        """takes_blocks: attention gets rows of a block in one piece, if they are in one."""
        self.offsets_as = offsets_as
        self.takes_blocks = takes_blocks
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
    """A mode in which only attention itself runs piece by piece, and rotary embeddings get an offset per row."""
    for name in {type(module).__module__ for module in model.modules()}:
        original = getattr(sys.modules.get(name), _ATTENTION, None)
        if original is not None and not hasattr(original, "knows_ragged"):
            setattr(sys.modules[name], _ATTENTION, _attend_in_pieces(original))
    rotary = [module for module in model.modules() if re.search("rope|rotary", type(module).__name__.lower())]
    return RaggedMode(((module, _rotate_by_row) for module in rotary), offsets_as, takes_blocks=True)


def mixers_by_row(model: nn.Module, offsets_as: OffsetsAs = Offsets) -> RaggedMode:
    """A mode in which the parts of a layer that get a cache run row by row, with their projections; the others do
    not."""
    parts = [
        module for layer in model.layers for _, module in tree_flatten(layer.children(), is_leaf=nn.Module.is_module)
    ]
    return RaggedMode(((module, _mix_by_row) for module in parts), offsets_as, takes_blocks=False)


def _attend_in_pieces(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    signature = inspect.signature(original)
    names = list(signature.parameters)
    mask_at = names.index("mask") - 3 if "mask" in names else None

    def attention(queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any) -> mx.array:
        if not isinstance(keys, Ragged):
            return original(queries, keys, values, *args, **kwargs)
        made, begin = [], 0
        for piece, size in enumerate(keys.sizes):
            its_args = [_of_piece(arg, piece) for arg in args]
            its_kwargs = {name: _of_piece(arg, piece) for name, arg in kwargs.items()}
            if (mask := keys.own_masks[piece]) is not None:
                _put_mask(mask, its_args, its_kwargs, mask_at)
            its_queries = _rows_of(queries, begin, begin + size)
            its_call = (its_queries, keys.pieces[piece], values.pieces[piece], *its_args)
            if parts := keys.parts[piece]:
                made.append(_attend_to_parts(signature.bind(*its_call, **its_kwargs).arguments, parts))
            else:
                made.append(original(*its_call, **its_kwargs))
            begin += size
        return made[0] if len(made) == 1 else mx.concatenate(made)

    attention.knows_ragged = True  # type: ignore[attr-defined]
    return attention


def _attend_to_parts(given: dict[str, Any], parts: Sequence[MlxKvPart]) -> mx.array:
    """Attention to parts and to a piece's own positions. given: the arguments of mlx-lm's function by name. Raises
    TypeError for some that parts do not know."""
    known = ("queries", "keys", "values", "cache", "scale", "mask")
    if unknown := [name for name, value in given.items() if name not in known and value is not None]:
        raise TypeError(f"attention with {unknown[0]} cannot take shared positions")
    mask = given.get("mask")
    if mask is not None and not (isinstance(mask, mx.array) and mask.dtype == mx.bool_):
        raise TypeError("shared positions need a mask that the caches made")
    return attend(given["queries"], given["keys"], given["values"], mask, parts, given["scale"])


def _put_mask(mask: mx.array, args: list[Any], kwargs: dict[str, Any], mask_at: int | None) -> None:
    """Replace a mask that is None or "causal" among the arguments after the values. A mask that is an array was made by
    the caches, and already takes the lengths of rows into account."""
    if mask_at is None:
        raise TypeError("this attention takes no mask")
    if mask_at < len(args):
        args[mask_at] = args[mask_at] if isinstance(args[mask_at], mx.array) else mask
    elif not isinstance(kwargs.get("mask"), mx.array):
        kwargs["mask"] = mask


def _rows_of(array: mx.array, begin: int, stop: int) -> mx.array:
    return array if stop - begin == array.shape[0] else array[begin:stop]


def _of_piece(value: Any, piece: int) -> Any:
    """A piece's own mask. Raises TypeError for a mask that model code made for all rows alike, because it may be
    wrong."""
    if isinstance(value, Ragged):
        return value.pieces[piece]
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
    """The number of rows of an argument, 0 if it is not ragged."""
    if isinstance(value, RaggedKv | RaggedStates | RaggedList):
        return len(value.entries)
    if isinstance(value, Ragged):
        return value.num_rows
    if isinstance(value, Offsets):
        return len(value.rows)
    if isinstance(value, tuple | list):
        return next((n for n in map(_num_rows, value) if n), 0)
    return 0


def _row_of(value: Any, row: int, num_rows: int) -> Any:
    """One row's part of an argument. Raises TypeError for an array whose rows cannot be told apart."""
    if isinstance(value, RaggedKv | RaggedStates | RaggedList):
        return value.entries[row]
    if isinstance(value, Ragged):
        return value.pieces[row]
    if isinstance(value, Offsets):
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
