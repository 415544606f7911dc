"""Keys and values that several sequences begin with, held once, and attention over them for all rows of a block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from exo_mesh.engine.contract import LEAST_SHARED as LEAST_SHARED
from exo_mesh.engine.contract import MOST_PARTS

MOST_DIRECT_TOKENS = 16
"""Longest row that attends to its parts where they are. A longer one gets all positions in one array: that costs little
beside its products."""

FIRST_STEP = 64
"""Positions by which the room behind parts grows at first. Many sequences may begin with the same parts and have few
positions of their own; mlx-lm's step of 256 would take more memory than the parts."""

STEP: int = KVCache.step
"""Positions by which it grows later, as in a cache of mlx-lm."""

_serials = count()


def room_behind_parts(length: int) -> int:
    """Positions to make room for, at least `length`."""
    step = FIRST_STEP if length <= STEP else STEP
    return -(-length // step) * step


class MlxKvPart:
    """Keys and values `[1, heads, length, width]` of some positions in one layer. Their contents never change."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys, self.values = keys, values
        self.length = int(keys.shape[2])
        self.serial = next(_serials)
        self._starts: WeakValueDictionary[int, MlxKvPart] = WeakValueDictionary()
        self._begins: ReferenceType[MlxKvPart] | None = None

    @property
    def memory(self) -> int:
        """A number that parts in the same memory have in common."""
        longer = self._begins() if self._begins else None
        return self.serial if longer is None else longer.serial

    def start(self, length: int) -> MlxKvPart:
        """The first positions, in the same memory; the same object for the same length."""
        if length == self.length:
            return self
        longer = self._begins() if self._begins else None
        if longer is not None:
            return longer.start(length)
        found = self._starts.get(length)
        if found is None:
            found = MlxKvPart(self.keys[:, :, :length], self.values[:, :, :length])
            self._adopt([found])
        return found

    def _adopt(self, starts: Sequence[MlxKvPart]) -> None:
        """Let shorter parts refer to this part's memory."""
        for part in starts:
            part.keys, part.values = self.keys[:, :, : part.length], self.values[:, :, : part.length]
            mx.eval(part.keys, part.values)  # a slice that is not made yet refers to the arrays that it is made from
            part._begins = ref(self)
            self._starts[part.length] = part

    def __del__(self) -> None:
        """Leave the memory to the longest of the shorter parts that are still held, which copies its positions: an
        array that refers to a piece of another array keeps all of that array in memory."""
        held = sorted(self._starts.values(), key=lambda part: part.length)
        if held:
            longest = held.pop()
            keys, values = mx.contiguous(longest.keys), mx.contiguous(longest.values)
            mx.eval(keys, values)
            longest.keys, longest.values, longest._begins = keys, values, None
            longest._adopt(held)

    def __deepcopy__(self, memo: dict[int, Any]) -> MlxKvPart:
        return self


class PartedKVCache(KVCache):  # type: ignore[misc]
    """A cache of keys and values that begins with parts. `offset` counts all positions; `keys` and `values` hold those
    behind the parts, and are None if there are none."""

    def __init__(self, parts: tuple[MlxKvPart, ...], offset: int, keys: Any, values: Any) -> None:
        super().__init__()
        self.parts, self.offset, self.keys, self.values = parts, offset, keys, values

    @property
    def shared(self) -> int:
        """Positions in parts."""
        return sum(part.length for part in self.parts)

    @property
    def step(self) -> int:
        """Positions by which `keys` and `values` grow."""
        return FIRST_STEP if self.offset < STEP else STEP  # mlx-lm reads it while `offset` counts only those

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[1, heads, n, width]`; returns all positions in one array, which lasts for this layer's attention."""
        return joined(self.parts, *self.append(keys, values))

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[1, heads, n, width]`; returns the positions behind the parts."""
        shared = self.shared
        self.offset -= shared
        own: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
        self.offset += shared
        return own

    def trim(self, n: int) -> int:
        """Drop the last n positions. Positions of a part that is cut short are copied if fewer than LEAST_SHARED are
        left of it."""
        n = min(self.offset, n)
        self.offset -= n
        if self.offset <= self.shared:
            self.keys = self.values = None
        if self.offset < self.shared:
            self._cut_parts()
        return n

    def _cut_parts(self) -> None:
        kept: list[MlxKvPart] = []
        at = 0
        for part in self.parts:
            if at + part.length <= self.offset:
                kept.append(part)
                at += part.length
                continue
            if (rest := self.offset - at) >= LEAST_SHARED:
                kept.append(part.start(rest))
            elif rest:
                self.keys = mx.contiguous(part.keys[:, :, :rest])
                self.values = mx.contiguous(part.values[:, :, :rest])
                mx.eval(self.keys, self.values)
            break
        self.parts = tuple(kept)

    def plain(self) -> KVCache:
        """The same positions in a cache without parts, in memory of its own."""
        cache = KVCache()
        cache.offset, own = self.offset, self.offset - self.shared
        if own:
            cache.keys, cache.values = joined(self.parts, self.keys[:, :, :own], self.values[:, :, :own])
        elif self.parts:
            cache.keys, cache.values = (_put_together([getattr(p, name) for p in self.parts]) for name in _NAMES)
        return cache

    def take(self, cache: KVCache) -> None:
        """Go on from where a cache is that `plain` gave. It has not been cut back into the parts."""
        self.offset, own = cache.offset, cache.offset - self.shared
        self.keys = self.values = None
        if own:
            arrays = (getattr(cache, name)[:, :, self.shared : cache.offset] for name in _NAMES)
            self.keys, self.values = map(mx.contiguous, arrays)
            mx.eval(self.keys, self.values)

    def empty(self) -> bool:
        return not self.offset


_NAMES = ("keys", "values")


def own_array(entry: Any, name: str) -> mx.array:
    """The keys or values of an entry behind its parts, `[1, heads, length, width]`; of length 0 if there are none."""
    array: mx.array | None = getattr(entry, name)
    if array is None:
        array = getattr(entry.parts[0], name)[:, :, :0]
    return array


def joined(parts: Sequence[MlxKvPart], keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Parts and the positions `[1, heads, n, width]` behind them, each in one array."""
    return _put_together([*(p.keys for p in parts), keys]), _put_together([*(p.values for p in parts), values])


def _put_together(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2)


def part_off(entry: Any, upto: int, least: int) -> Any:
    """The entry with its first `upto` positions in parts, if the last part gets `least` positions and there are few
    parts: a PartedKVCache in place of the entry, or the entry itself. It must not be in a block."""
    parts: tuple[MlxKvPart, ...] = getattr(entry, "parts", ())
    shared = sum(part.length for part in parts)
    new = upto - shared
    if new < least or len(parts) == MOST_PARTS:
        return entry
    own = entry.offset - shared
    cut = [mx.contiguous(array[:, :, :new]) for array in (entry.keys, entry.values)]
    rest = [mx.contiguous(array[:, :, new:own]) for array in (entry.keys, entry.values)] if own > new else [None, None]
    mx.eval(cut, [array for array in rest if array is not None])
    return PartedKVCache((*parts, MlxKvPart(*cut)), entry.offset, *rest)


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, parts: Sequence[MlxKvPart], scale: float
) -> mx.array:
    """Attention `[rows, query_heads, n, width]` of rows that begin with the same parts, which are multiplied once for
    all rows. keys, values: the rows' own positions, `[rows, heads, own, width]`. mask: bool `[rows, 1, n, positions]`,
    whose last columns are the own positions."""
    rows, query_heads, n, width = queries.shape
    heads = keys.shape[1]
    grouped = (queries * scale).reshape(rows, heads, -1, width)  # query heads with the same keys side by side
    joint = grouped.swapaxes(0, 1).reshape(1, heads, -1, width)
    scores = [_by_row(joint @ part.keys.swapaxes(-1, -2), rows) for part in parts]
    own = grouped @ keys.swapaxes(-1, -2)
    if mask is not None:
        mask = mask[..., mask.shape[-1] - own.shape[-1] :]
        own = mx.where(mx.tile(mask, (1, 1, query_heads // heads, 1)), own, mx.finfo(own.dtype).min)
    weights = mx.softmax(mx.concatenate([*scores, own], axis=-1), axis=-1, precise=True)
    shared = sum(part.length for part in parts)
    result, at = weights[..., shared:] @ values, 0
    for part in parts:
        its = weights[..., at : at + part.length].swapaxes(0, 1).reshape(1, heads, -1, part.length)
        result = result + _by_row(its @ part.values, rows)
        at += part.length
    return result.reshape(rows, query_heads, n, -1)


def own_mask(n: int, own: int) -> mx.array | None:
    """The mask of the last n of a row's own positions, bool `[1, 1, n, own]`; None if they see all."""
    return None if n == 1 else (mx.arange(own) <= mx.arange(own - n, own)[:, None])[None, None]


def _by_row(array: mx.array, rows: int) -> mx.array:
    """`[1, heads, rows * m, width]` as `[rows, heads, m, width]`."""
    return array.reshape(array.shape[1], rows, -1, array.shape[-1]).swapaxes(0, 1)
