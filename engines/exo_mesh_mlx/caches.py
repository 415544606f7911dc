"""The KV caches of one sequence on one stage: real entries, aliases and phantoms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models import cache as mlx_caches

from exo_mesh_mlx import tree
from exo_mesh_mlx.kv import ChunkKVCache, Pasts, WindowKVCache, can_cut, is_state, parts_of
from exo_mesh_mlx.ragged import Offsets, OffsetsAs, once_each, ragged
from exo_mesh_mlx.shared import parts as shared_parts
from exo_mesh_mlx.shared.blocks import BlockRows, KvBlock
from exo_mesh_mlx.shared.parts import PartedKVCache
from exo_mesh_mlx.trace import MlxTrace

_KEYS_AND_VALUES = (mlx_caches.KVCache, mlx_caches.RotatingKVCache, WindowKVCache, ChunkKVCache, PartedKVCache)


class CacheLayout(msgspec.Struct, frozen=True):
    """The layout of a stage's caches. slots[i]: the entry that stands for entry i of the model's full-length cache
    list.

    Entries of this stage's layers stand for themselves. An entry of a ghost is replaced by an entry of the same kind
    that the stage keeps, so that masks and offsets computed from it are right. A kind that no layer of the stage has
    gets one `phantom`, which the stage advances itself. Entries that no layer uses belong to the code around the
    layers, which runs on every stage and advances them.
    """

    slots: tuple[int, ...]
    phantoms: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.slots)))


def plan_caches(trace: MlxTrace, full: list[Any], start: int, stop: int) -> CacheLayout:
    """The layout of stage `[start, stop)`, from a fresh full-length cache list."""
    of_layers = {slot for use in trace.layers for slot in use.slots}
    mine = {slot for use in trace.layers[start:stop] for slot in use.slots}
    own = mine | (set(range(len(full))) - of_layers)
    representative: dict[Any, int] = {}
    for slot in sorted(mine):
        representative.setdefault(cache_kind(full[slot]), slot)
    phantoms: list[int] = []
    slots: list[int] = []
    for slot, entry in enumerate(full):
        kind = cache_kind(entry)
        if slot not in own and kind not in representative:
            representative[kind] = slot
            phantoms.append(slot)
        slots.append(slot if slot in own else representative[kind])
    return CacheLayout(tuple(slots), tuple(phantoms))


def cache_kind(entry: Any) -> Any:
    """A value that is equal for entries whose offsets and masks are equal at all times."""
    parts = getattr(entry, "caches", None)
    if parts is not None:
        return (type(entry).__name__, *(cache_kind(part) for part in parts))
    arrays = getattr(entry, "cache", None)
    num_arrays = len(arrays) if isinstance(arrays, list) else None
    settings = tuple(getattr(entry, name, None) for name in ("max_size", "keep", "chunk_size", "bits"))
    return (type(entry).__name__, num_arrays, *settings)


class SequenceCache:
    """The caches that one stage keeps for one sequence, and how many positions they hold."""

    def __init__(self, full: list[Any], layout: CacheLayout) -> None:
        self.layout = layout
        self.entries = {slot: full[slot] for slot in layout.kept}
        self.full = [self.entries[slot] for slot in layout.slots]
        """A cache list as long as the model expects."""
        self.pasts = Pasts(self.entries.values())
        self.length = 0
        self.block: KvBlock | None = None
        """Where the keys and values are, if the sequence shares arrays with others. Its entries then hold none, and
        `settle` must come before anything else uses them."""
        self._parted: list[PartedKVCache] = []
        """The entries that begin with parts."""
        self.shared = 0
        """Positions in shared parts."""
        self._folded: dict[int, PartedKVCache] = {}
        """While the sequence is assembled: what its entries are after `fold`."""
        self._assembled = 0
        """Positions in the parts of these entries."""

    def shareable(self) -> tuple[int, ...]:
        """The entries whose keys and values can be in a block. Windows, chunks, recurrent states and phantoms stay with
        their sequence."""
        return tuple(
            slot
            for slot, entry in self.entries.items()
            if slot not in self.layout.phantoms
            and ((type(entry) is mlx_caches.KVCache and entry.keys is not None) or type(entry) is PartedKVCache)
        )

    @property
    def begins_with(self) -> tuple[int, ...]:
        """The numbers of the shared parts, of one entry for all: rows of one block begin with the same parts."""
        return tuple(part.serial for part in self._parted[0].parts) if self._parted else ()

    @property
    def parts_in(self) -> frozenset[int]:
        """The memory of the parts that it holds, assembled or not; see `MlxKvPart.memory`."""
        held = next(iter(self._parted or self._folded.values()), None)
        return frozenset(part.memory for part in held.parts) if held else frozenset()

    @property
    def own_length(self) -> int:
        """Positions behind shared parts."""
        return self.length - self.shared

    def part_off(self, upto: int, least: int = 0) -> None:
        """Put the first `upto` positions of keys and values into parts, which copies then share. least: the shortest
        part, by default LEAST_SHARED."""
        least = least or shared_parts.LEAST_SHARED
        if upto < least + self.shared:
            return
        self.settle()
        self.full = []  # it would keep each layer's arrays until all layers are copied
        for slot in self.shareable():
            self.entries[slot] = shared_parts.part_off(self.entries[slot], upto, least)
        self._replace({})

    def assemble(self) -> bool:
        """Put the positions of entries with parts in one array each, besides the parts. Until `fold`, the sequence is
        as one that shares nothing. Returns False, with nothing changed, if it has no parts or is assembled."""
        if not self.shared:
            return False
        self.leave_block()
        self._folded = {slot: entry for slot, entry in self.entries.items() if type(entry) is PartedKVCache}
        self._assembled = self.shared
        self._replace({slot: entry.plain() for slot, entry in self._folded.items()})
        for entry in self._folded.values():
            entry.keys = entry.values = None
        return True

    def fold(self) -> None:
        """Undo `assemble`."""
        if not self._folded:
            return
        folded, self.full = self._folded, []  # it would keep each layer's arrays until the end
        self.give_up_parts()
        for slot, entry in folded.items():
            entry.take(self.entries[slot])
            self.entries[slot] = entry
        self._replace({})

    def shares_all(self) -> bool:
        """Whether all its keys and values begin with parts."""
        kept = [entry for entry in self.own_entries() if getattr(entry, "keys", entry) is not None]
        kinds = (PartedKVCache, mlx_caches.ArraysCache)
        return bool(self._parted) and all(isinstance(entry, kinds) for entry in kept)

    def give_up_parts(self) -> None:
        """Keep only the arrays that `assemble` made, if it is assembled."""
        self._folded, self._assembled = {}, 0

    def _replace(self, entries: Mapping[int, Any]) -> None:
        self.entries.update(entries)
        self.full = [self.entries[slot] for slot in self.layout.slots]
        self._parted = [entry for entry in self.entries.values() if type(entry) is PartedKVCache]
        self.shared = self._parted[0].shared if self._parted else 0

    def leave_block(self) -> None:
        """Move keys and values that are in a block back to the entries."""
        if self.block is not None:
            self.block.take_out([self])

    def settle(self) -> None:
        """Bring the entries into the state in which they can be copied, saved or cut back to any length."""
        self.leave_block()
        self.fold()

    def release(self) -> None:
        """Give up keys and values that are in a block, because the sequence ends."""
        if self.block is not None:
            self.block.drop(self)

    def own_entries(self) -> list[Any]:
        """The entries of the stage's own layers."""
        return [entry for slot, entry in self.entries.items() if slot not in self.layout.phantoms]

    def kv_heads(self) -> int:
        """The most heads of keys in an entry of the stage's own layers; 0 before the first row, and for states."""
        keys = [getattr(part, "keys", None) for one in self.own_entries() for part in getattr(one, "caches", (one,))]
        return max((array.shape[1] for array in keys if array is not None), default=0)

    def advance(self, num_tokens: int) -> None:
        """Advance the phantoms after a forward over num_tokens, because no layer has advanced them."""
        for slot in self.layout.phantoms:
            _advance(self.entries[slot], num_tokens)
        self.length += num_tokens

    def cut_back(self, length: int) -> bool:
        """Drop positions from `length` on; returns False, with nothing changed, if some entry cannot."""
        surplus = self.length - length
        if not surplus:
            return True
        parts = [part for part in parts_of(self.entries.values()) if not is_state(part)]
        if not (self.pasts.reaches(length) and all(can_cut(part, surplus) for part in parts)):
            return False
        if length < self.shared or length < self._assembled:
            self.settle()
            parts = [part for part in parts_of(self.entries.values()) if not is_state(part)]
        for part in parts:
            part.trim(surplus)
        self.pasts.go_back(length)
        if length < self.shared:
            self.shared = self._parted[0].shared
        self.length = length
        return True

    def copied(self) -> SequenceCache:
        """Separate caches with the same contents; MLX copies an array when one of the two is written to."""
        self.settle()
        entries = {slot: deepcopy(entry) for slot, entry in self.entries.items()}
        copy = SequenceCache([entries.get(slot) for slot in range(len(self.layout.slots))], self.layout)
        copy._replace({})
        copy.length = self.length
        return copy

    def contents(self) -> list[Any]:
        """The contents of each own entry that a forward replaces or advances: to be compared by identity, or by value
        for counts."""
        parts = [part for entry in self.own_entries() for part in getattr(entry, "caches", (entry,))]
        return [item for part in parts for item in (getattr(part, "cache", None) or [part.offset])]

    def arrays(self) -> list[mx.array]:
        """All arrays of the state, without a block's; they must be evaluated with each forward, or lazy graphs grow
        without end."""
        found: list[mx.array] = []
        for entry in self.entries.values():
            if type(entry) in _KEYS_AND_VALUES:  # the contents are known, so no walk through a tree is needed
                if entry.keys is not None:
                    found += (entry.keys, entry.values)
            else:
                found += (array for _, array in tree.arrays(entry.state))
        return found

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def arrays_of(caches: Iterable[SequenceCache]) -> list[mx.array]:
    """All arrays of the sequences' caches, and of the blocks that they are in, each once."""
    blocks: dict[int, KvBlock] = {}
    found: list[mx.array] = []
    for cache in caches:
        found += cache.arrays()
        if cache.block is not None:
            blocks[id(cache.block)] = cache.block
    for block in blocks.values():
        found += block.arrays()
    return found


class CacheRows:
    """Sequences whose rows are computed in one forward, in row order."""

    def __init__(
        self,
        caches: Sequence[SequenceCache],
        offsets_as: OffsetsAs = Offsets,
        order: Sequence[int] = (),
        *,
        in_place: bool = True,
    ) -> None:
        """order: the order in which the rows are computed, as indexes of `caches`; the given one if empty. Rows of one
        block must be side by side, in the order of the block. in_place: a single row attends to its parts where they
        are, which needs a mode that is on."""
        self._order = None if list(order) == sorted(order) else list(order)
        self._caches = caches if self._order is None else [caches[index] for index in self._order]
        self._offsets_as = offsets_as
        self._in_place = in_place

    def arranged(self, array: mx.array) -> mx.array:
        """An array with the rows in the order in which they are computed."""
        return array if self._order is None else array[mx.array(self._order)]

    def restored(self, array: mx.array) -> mx.array:
        """An array with the rows in the order in which the sequences were given."""
        return array if self._order is None else array[mx.argsort(mx.array(self._order))]

    def full(self, n: int) -> list[Any]:
        """A cache list as long as the model expects, for a forward of n tokens per row; with a batch axis if there are
        several sequences."""
        if len(self._caches) == 1:
            self._caches[0].leave_block()
            if not (self._in_place and self._caches[0].shared):
                return self._caches[0].full
        runs = [(block, list(run)) for block, run in groupby(self._caches, key=lambda cache: cache.block)]
        for block, run in runs:
            if block is not None and len(run) == len(block.rows):
                block.begin(n)
        offsets_as = once_each(self._offsets_as)
        views = {slot: ragged(self._of_slot(slot, runs), offsets_as) for slot in self._caches[0].entries}
        return [views[slot] for slot in self._caches[0].layout.slots]

    @staticmethod
    def _of_slot(slot: int, runs: list[tuple[KvBlock | None, list[SequenceCache]]]) -> list[Any]:
        entries: list[Any] = []
        for block, run in runs:
            if block is not None and slot in block.slots:
                entries.append(BlockRows(block, slot, run))
            else:
                entries += [cache.entries[slot] for cache in run]
        return entries

    def advance(self, num_tokens: int) -> None:
        for cache in self._caches:
            cache.advance(num_tokens)


def _advance(entry: Any, num_tokens: int) -> None:
    parts = getattr(entry, "caches", None)
    if parts is not None:
        for part in parts:
            _advance(part, num_tokens)
    elif hasattr(entry, "update_and_fetch"):
        nothing = mx.zeros((1, 1, num_tokens, 1))
        entry.update_and_fetch(nothing, nothing)
    elif isinstance(getattr(entry, "cache", None), list):
        entry.cache = [mx.zeros((1, 1)) for _ in entry.cache]
        entry.advance(num_tokens)
