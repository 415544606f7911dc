"""Keeps the keys and values of several sequences in one array per layer, so that their rows attend in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from exo_mesh_mlx.shared.parts import STEP, MlxKvPart, joined, own_array, room_behind_parts

SPARE = 0.25
"""Free places of a block, relative to those in use, above which it shrinks. The next sequence needs one soon, but their
memory may be wanted elsewhere. One place may always be free."""


class BlockMember(Protocol):
    """A sequence, as blocks see it. entries: its caches. length: positions that they hold. block: where its keys and
    values are, or None."""

    entries: dict[int, Any]
    length: int
    block: KvBlock | None
    shared: int
    """Positions in parts, which stay out of blocks."""

    @property
    def begins_with(self) -> tuple[int, ...]:
        """The numbers of the parts."""


class KvBlock:
    """Keys and values `[places, heads, capacity, width]` of the entries at `slots`. Place i belongs to `rows[i]`. Each
    row begins at position 0, and ends at the length of its sequence; what follows is zero or what the same sequence
    held before it was cut back. Rows may begin with the same parts (`MlxKvPart`): positions count from their end.

    The entries of the rows hold no arrays meanwhile, only their offsets. A row may be cut back, join or leave without
    the others being moved: the last row takes the place of one that leaves.
    """

    def __init__(self, slots: tuple[int, ...]) -> None:
        self.slots = slots
        self.rows: list[BlockMember] = []
        self.num_partial = 0
        """The number of forwards since all rows were in one."""
        self._keys: dict[int, mx.array] = {}
        self._values: dict[int, mx.array] = {}
        self._places = self._capacity = 0
        self._step: _Step | None = None
        self.shared = 0
        self.parts: dict[int, tuple[MlxKvPart, ...]] = {}
        """What all rows begin with, for each slot."""

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return [*self._keys.values(), *self._values.values()]

    def add(self, caches: Sequence[BlockMember]) -> None:
        """Move the keys and values of sequences into free places. All rows are copied if there are too few places or
        positions."""
        first, count = len(self.rows), len(self.rows) + len(caches)
        if not self.rows:
            self.shared = caches[0].shared
            self.parts = {slot: getattr(caches[0].entries[slot], "parts", ()) for slot in self.slots}
        longest = max(cache.length for cache in caches) - self.shared
        self._grow(longest)
        capacity = max(self._capacity, self._room(longest))
        for slot in self.slots:
            for held, name in ((self._keys, "keys"), (self._values, "values")):
                new = [_of_length(own_array(cache.entries[slot], name), capacity) for cache in caches]
                if count <= self._places:
                    for place, array in enumerate(new, first):
                        held[slot][place : place + 1] = array
                else:
                    held[slot] = mx.concatenate([held[slot][:first], *new] if first else new)
            for cache in caches:
                cache.entries[slot].keys = cache.entries[slot].values = None
        self._places, self._capacity = max(self._places, count), capacity
        for cache in caches:
            cache.block = self
        self.rows += caches

    def take_out(self, leaving: Sequence[BlockMember]) -> None:
        """Copy rows back to the entries of their sequences, which leave the block."""
        self._leave(leaving, keep=True)

    def drop(self, leaving: BlockMember) -> None:
        """Free the place of a row, whose keys and values are lost."""
        self._leave([leaving], keep=False)

    def _leave(self, leaving: Sequence[BlockMember], *, keep: bool) -> None:
        """Free places; the last rows move into them. Goes layer by layer, so that little memory is needed besides."""
        places = [self.rows.index(cache) for cache in leaving]
        count = len(self.rows) - len(leaving)
        holes = sorted(place for place in places if place < count)
        moves = list(zip((place for place in range(count, len(self.rows)) if place not in places), holes, strict=True))
        shrinks = self._places - count > max(1, SPARE * count)
        for slot in self.slots:
            for held, name in ((self._keys, "keys"), (self._values, "values")):
                if keep:
                    self._copy_back(slot, held[slot], name, leaving, places)
                for source, hole in moves:
                    held[slot][hole : hole + 1] = mx.contiguous(held[slot][source : source + 1])
                if not count:
                    del held[slot]
                elif shrinks:
                    held[slot] = mx.contiguous(held[slot][:count])
                    mx.eval(held[slot])
        for source, hole in moves:
            self.rows[hole] = self.rows[source]
        del self.rows[count:]
        self._places = count if shrinks else self._places
        for cache in leaving:
            cache.block = None

    def _copy_back(
        self, slot: int, array: mx.array, name: str, leaving: Sequence[BlockMember], places: Sequence[int]
    ) -> None:
        copies = []
        for cache, place in zip(leaving, places, strict=True):
            if self.shared and cache.length == self.shared:
                continue  # the entry has no positions of its own
            length = min(self._capacity, self._room(cache.length - self.shared))
            copies.append(mx.contiguous(array[place : place + 1, :, :length]))
            setattr(cache.entries[slot], name, copies[-1])
        mx.eval(copies)  # a copy that is not made yet refers to the whole array, which the next write would copy then

    def begin(self, n: int) -> None:
        """Prepare a forward of n tokens for each row: make room, and work out positions and mask once for all
        layers."""
        shared = self.shared
        lengths = [cache.length - shared for cache in self.rows]
        self._grow(max(lengths) + n)
        self._step = _Step(lengths, n)

    def _grow(self, length: int) -> None:
        """Make room for sequences of this length, if the block has rows."""
        if not self.rows or length <= self._capacity:
            return
        self._capacity = self._room(length)
        for held in (self._keys, self._values):
            for slot in self.slots:
                held[slot] = _of_length(held[slot], self._capacity)

    def _room(self, length: int) -> int:
        """Positions of a place for a sequence of this length."""
        return room_behind_parts(length) if self.shared else -(-length // STEP) * STEP

    def append(self, slot: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[rows, heads, n, width]` to all rows; returns all positions up to the end of the longest row. Raises
        ValueError if the rows are not where `begin` found them."""
        step = self._step
        if (
            step is None
            or keys.shape[2] != step.n
            or self.rows[0].entries[slot].offset - self.shared != step.lengths[0]
        ):
            raise ValueError("an entry is written to twice in a forward")
        used = len(self.rows)
        for held, new in ((self._keys, keys), (self._values, values)):
            if used == self._places:
                held[slot] = mx.put_along_axis(held[slot], step.positions, new, axis=2)
            else:
                held[slot][mx.arange(used)[:, None], :, step.positions[:, 0, :, 0]] = new.swapaxes(1, 2)
        for cache in self.rows:
            cache.entries[slot].offset += step.n
        return self._keys[slot][:used, :, : step.stop], self._values[slot][:used, :, : step.stop]

    def append_to(
        self, caches: Sequence[BlockMember], slot: int, keys: mx.array, values: mx.array
    ) -> list[tuple[mx.array, mx.array]]:
        """Append `[len(caches), heads, n, width]` to some rows; returns the positions of each, `[1, ...]`."""
        places, entries = [self.rows.index(cache) for cache in caches], [cache.entries[slot] for cache in caches]
        begins, n = [entry.offset - self.shared for entry in entries], keys.shape[2]
        self._grow(max(begins) + n)
        for row, (place, begin) in enumerate(zip(places, begins, strict=True)):
            for held, new in ((self._keys, keys), (self._values, values)):
                held[slot][place : place + 1, :, begin : begin + n] = new[row : row + 1]
        for entry in entries:
            entry.offset += n
        # All rows are written first: a row that is read refers to the whole array, which the next write would copy.
        return [
            joined(
                self.parts[slot],
                self._keys[slot][place : place + 1, :, : begin + n],
                self._values[slot][place : place + 1, :, : begin + n],
            )
            for place, begin in zip(places, begins, strict=True)
        ]

    def mask(self, window_size: int | None = None, *, always: bool = False) -> mx.array | None:
        """The mask of the present forward, bool `[rows, 1, n, positions]`. None if all rows are of equal length, and
        the causal mask of one row is right for all; with `always`, or with a window, it is never None."""
        if self._step is None:
            raise ValueError("a mask before the forward has begun")
        if self.shared and window_size is not None:
            raise ValueError("a window over shared positions")
        return self._step.mask(window_size, always=always or (self.shared > 0 and self._step.n > 1))


class BlockRows:
    """One entry of all rows of a block, or of some of them. All of them attend in one piece, some of them in a piece
    each."""

    __slots__ = ("_block", "_caches", "_is_whole", "_slot", "sizes")

    def __init__(self, block: KvBlock, slot: int, caches: Sequence[BlockMember]) -> None:
        """caches: of the rows, in the order of the block."""
        self._block, self._slot, self._caches = block, slot, caches
        self._is_whole = len(caches) == len(block.rows)
        self.sizes = [len(caches)] if self._is_whole else [1] * len(caches)
        """The number of rows of each piece."""

    @property
    def offsets(self) -> list[int]:
        return [cache.entries[self._slot].offset for cache in self._caches]

    def fetch(self, keys: mx.array, values: mx.array) -> list[tuple[mx.array, mx.array]]:
        """Append keys and values of n tokens per row; returns each piece's keys and values."""
        if self._is_whole:
            return [self._block.append(self._slot, keys, values)]
        return self._block.append_to(self._caches, self._slot, keys, values)

    def masks(self, n: int, return_array: bool = False, window_size: int | None = None) -> list[Any]:
        """What a cache's make_mask returns, for each piece. None and "causal" stand for `own_mask`."""
        if not self._is_whole:
            wanted = {"return_array": return_array, "window_size": window_size}
            return [cache.entries[self._slot].make_mask(n, **wanted) for cache in self._caches]
        if return_array or window_size is not None:
            return [self._block.mask(window_size, always=True)]
        return [None if n == 1 else "causal"]

    @property
    def parts(self) -> list[tuple[MlxKvPart, ...]]:
        """The parts that the keys and values of each piece lack."""
        return [self._block.parts[self._slot]] if self._is_whole else [()] * len(self.sizes)

    @property
    def own_masks(self) -> list[mx.array | None]:
        """The mask of each piece in place of None and "causal"; None if these are right."""
        return [self._block.mask()] if self._is_whole else [None] * len(self.sizes)


class _Step:
    """Where the rows of a block are in one forward of n tokens each."""

    def __init__(self, lengths: list[int], n: int) -> None:
        self.lengths, self.n = lengths, n
        self.stop = max(lengths) + n
        """The end of the longest row."""
        self.positions = mx.array(lengths, mx.int32)[:, None, None, None] + mx.arange(n, dtype=mx.int32)[:, None]
        """int32 `[rows, 1, n, 1]`."""
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window_size: int | None, *, always: bool) -> mx.array | None:
        if not always and window_size is None and min(self.lengths) == max(self.lengths):
            return None
        if window_size not in self._masks:
            every = mx.arange(self.stop, dtype=mx.int32)
            seen = every <= self.positions
            self._masks[window_size] = seen if window_size is None else seen & (self.positions < every + window_size)
        return self._masks[window_size]


def _of_length(array: mx.array, length: int) -> mx.array:
    """`[rows, heads, length, width]`: cut off, or with zeros at the end."""
    if array.shape[2] >= length:
        return array[:, :, :length]
    rows, heads, has, width = array.shape
    return mx.concatenate([array, mx.zeros((rows, heads, length - has, width), array.dtype)], axis=2)
