"""Decides which sequences share a block of keys and values, as their rows come and go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from exo_mesh_mlx.caches import SequenceCache
from exo_mesh_mlx.grouping import MAX_GROUPED_ROWS
from exo_mesh_mlx.shared.blocks import KvBlock
from exo_mesh_mlx.shared.parts import STEP

MAX_SPREAD = 1.25
"""Longest row of a block against its shortest one, which may also differ by STEP: a block takes the memory of its
longest row for each row, so at most a fifth of it is padding."""

PATIENCE = 4
"""Forwards with some rows of a block after which the others leave it: rows of a part attend one by one."""


class BlockKeeper:
    """Puts the sequences of a forward into blocks. All ranks of a tensor group decide alike: from the rows of frames
    only."""

    def __init__(self) -> None:
        self.is_on = False

    def arrange(self, caches: Sequence[SequenceCache]) -> list[int]:
        """Move sequences into blocks and out of them; returns the order in which the rows must be computed, as indexes:
        rows of one block are side by side, in its order."""
        if not self.is_on or len(caches) < 2:
            return list(range(len(caches)))
        blocks = list(dict.fromkeys(cache.block for cache in caches if cache.block is not None))
        wanted = set(map(id, caches))
        for block in blocks:
            _tidy(block, wanted)
        _merge([block for block in blocks if block.rows])
        loose = [cache for cache in caches if cache.block is None]
        _house(loose, [block for block in blocks if block.rows])
        return _order(caches)


def _order(caches: Sequence[SequenceCache]) -> list[int]:
    places = {id(cache): index for index, cache in enumerate(caches)}
    order: dict[int, None] = {}
    for index, cache in enumerate(caches):
        if cache.block is None:
            order[index] = None
        else:
            order |= {places[id(row)]: None for row in cache.block.rows if id(row) in places}
    return list(order)


def is_similar(shortest: int, longest: int) -> bool:
    """Whether sequences of these lengths, and all between them, may share a block."""
    return longest <= max(MAX_SPREAD * shortest, shortest + STEP)


def _tidy(block: KvBlock, wanted: set[int]) -> None:
    """Take out rows that have not been wanted for some time, and rows that are too long for the shortest row."""
    absent = [cache for cache in block.rows if id(cache) not in wanted]
    block.num_partial = block.num_partial + 1 if absent else 0
    leaving = absent if block.num_partial > PATIENCE else []
    staying = [cache for cache in block.rows if cache not in leaving]
    shared = block.shared
    shortest = min(cache.length for cache in staying) - shared
    leaving += [cache for cache in staying if not is_similar(shortest, cache.length - shared)]
    if len(leaving) + 1 >= len(block.rows):
        leaving = list(block.rows)  # one row has no use for a block
    if leaving:
        block.take_out(leaving)


def _merge(blocks: list[KvBlock]) -> None:
    """Dissolve a block whose rows all fit into another one."""
    blocks = sorted(
        (block for block in blocks if not block.num_partial), key=lambda block: (_begins(block), _shortest(block))
    )
    for one, other in pairwise(blocks):
        alike = is_similar(_shortest(one), max(_longest(one), _longest(other))) and _begins(one) == _begins(other)
        if alike and _has_room(other, len(one.rows)):
            one.take_out(list(one.rows))


def _house(caches: Sequence[SequenceCache], blocks: Sequence[KvBlock]) -> None:
    """Put sequences that are in no block into one of `blocks`, or into a new one with their like."""
    joining: dict[KvBlock, list[SequenceCache]] = {}
    alike: list[SequenceCache] = []
    for cache in sorted(caches, key=lambda cache: (cache.begins_with, cache.own_length)):
        block = next((block for block in blocks if _fits(cache, block, len(joining.get(block, ())))), None)
        if block is not None:
            joining.setdefault(block, []).append(cache)
            continue
        like = alike and alike[0].begins_with == cache.begins_with
        if alike and not (like and is_similar(alike[0].own_length, cache.own_length) and len(alike) < MAX_GROUPED_ROWS):
            _found(alike)
            alike = []
        alike.append(cache)
    _found(alike)
    for block, new in joining.items():
        block.add(new)


def _fits(cache: SequenceCache, block: KvBlock, num_joining: int) -> bool:
    if cache.begins_with != _begins(block):
        return False
    shortest, longest = min(cache.own_length, _shortest(block)), max(cache.own_length, _longest(block))
    return is_similar(shortest, longest) and _has_room(block, num_joining + 1)


def _found(caches: list[SequenceCache]) -> None:
    """Start a block with these sequences, if there are several."""
    slots = caches[0].shareable() if len(caches) > 1 else ()
    if slots:
        KvBlock(slots).add(caches)


def _has_room(block: KvBlock, count: int) -> bool:
    return len(block.rows) + count <= MAX_GROUPED_ROWS


def _begins(block: KvBlock) -> tuple[int, ...]:
    return block.rows[0].begins_with


def _shortest(block: KvBlock) -> int:
    return min(cache.length for cache in block.rows) - block.shared


def _longest(block: KvBlock) -> int:
    return max(cache.length for cache in block.rows) - block.shared
