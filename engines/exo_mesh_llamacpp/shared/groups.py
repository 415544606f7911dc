"""Groups of sequences that begin alike: one context with one set of cells, in which they hold common positions once.

Each row attends to all cells of its group, with those of other sequences masked. That costs time for every cell that is
not its own. So a group takes a new sequence only while it has few such cells, and is divided when it has too many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from exo_mesh.errors import EngineError
from exo_mesh_llamacpp.context import LlamaContext
from exo_mesh_llamacpp.shared.pool import Held, Pool
from exo_mesh_llamacpp.shared.runs import SharedRuns

SLOTS = 64
"""Slots of a group. The last one is free between calls: states of parts of sequences go through it."""

CELL_STEP = 256
"""The library rounds the cells of a context to a multiple of this."""

GROWTH, AHEAD = 1.25, 32
"""A group grows to so many times the cells that it needs, and so many for each sequence: growing copies all of them."""

MakeShared = Callable[[int], LlamaContext]
"""Makes a context of SLOTS slots that share so many cells."""


class CellGroup(Pool, eq=False):
    """A pool whose sequences share its cells."""

    runs: SharedRuns = msgspec.field(default_factory=SharedRuns)

    @property
    def free_slot(self) -> int | None:
        return next((slot for slot in range(SLOTS - 1) if slot not in self.taken), None)

    def cut(self, slot: int, length: int) -> bool:
        self.runs.cut(slot, length)
        return self.context.cut(slot, length)

    def beginning(self, slot: int, upto: int) -> np.ndarray:
        return self.state(slot, 0, upto)

    def state(self, slot: int, start: int, stop: int) -> np.ndarray:
        """The state of some positions of a sequence, which stays as it is."""
        spare = SLOTS - 1
        self.context.share(slot, spare, start, stop)
        state = self.context.save(spare)
        self.context.cut(spare, 0)
        return state

    def foreign(self, joining: int = 0) -> int:
        """Cells that a sequence attends to and does not hold, on the average. joining: positions of one more sequence
        that begins with cells of the group."""
        lengths = [self.runs.length(slot) for slot in self.taken] + [joining] * bool(joining)
        return self.runs.used - sum(lengths) // max(1, len(lengths))

    def begin(self, source: int, upto: int) -> int:
        """Begin a sequence with the first positions of another one; returns its slot."""
        slot = self.free_slot
        assert slot is not None, "a group that takes a sequence has a free slot"
        self.taken.add(slot)
        self.context.share(source, slot, 0, upto)
        self.runs.copy(source, slot, upto)
        return slot

    def crowding(self, members: Sequence[Held]) -> list[Held]:
        """The sequences with the most positions of their own, which together have half of all such positions."""
        own = {held.slot: self.runs.own(held.slot) for held in members}
        left, found = sum(own.values()) / 2, []
        for held in sorted(members, key=lambda held: (-own[held.slot], held.slot)):
            found.append(held)
            left -= own[held.slot]
            if left <= 0:
                break
        return found


def room_for(used: int, sequences: int) -> int:
    """Cells of a group that has outgrown its own and needs `used`."""
    return _rounded(int(GROWTH * used) + AHEAD * sequences)


def new_group(make: MakeShared, cells: int) -> CellGroup:
    """An empty group with room for so many positions. Raises EngineError without memory."""
    cells = _rounded(cells)
    return CellGroup(cells, make(cells))


def regrouped(
    make: MakeShared, group: CellGroup, members: Sequence[Held], more: int
) -> tuple[CellGroup, dict[int, int]]:
    """A new group with some sequences of another one, which stays as it is, and their slots there, {from: to}.

    more: positions for which the new group must have room besides. Raises EngineError without memory.
    """
    slots = sorted(held.slot for held in members)
    runs = _runs_of(group.runs, slots)
    made = new_group(make, room_for(runs.used + more, len(slots)))
    made.runs = runs
    made.taken = set(range(len(slots)))
    try:
        for place, slot in enumerate(slots):
            _carry(group, made, slots[:place], slot)
    except EngineError:
        made.context.free()
        raise
    return made, {slot: place for place, slot in enumerate(slots)}


def _runs_of(old: SharedRuns, slots: Sequence[int]) -> SharedRuns:
    """The runs of some slots, renumbered as slots 0, 1, 2, …"""
    runs = SharedRuns()
    for place, slot in enumerate(slots):
        other, common = _nearest(old, slots[:place], slot)
        if common:
            runs.copy(other, place, common)
        runs.extend(place, old.length(slot) - common)
    return runs


def _nearest(runs: SharedRuns, slots: Sequence[int], slot: int) -> tuple[int, int]:
    """The index in `slots` of the slot that shares most positions with `slot`, and how many it shares."""
    common = [runs.common(other, slot) for other in slots]
    best = max(range(len(common)), key=common.__getitem__, default=0)
    return best, common[best] if common else 0


def _carry(old: CellGroup, new: CellGroup, before: Sequence[int], slot: int) -> None:
    """Move a sequence's computed KV into another group, and share cells with the sequence there that begins most
    alike."""
    place, spare = len(before), SLOTS - 1
    length = old.context.length(slot)  # positions that are reserved but not computed have no state
    other, common = _nearest(old.runs, before, slot)
    common = min(common, length)
    if common:
        new.context.share(other, place, 0, common)
    if common == length:
        return
    if not new.context.restore(spare, old.state(slot, common, length)):
        raise EngineError("the state of a sequence could not be moved")
    new.context.share(spare, place, common, length)
    new.context.cut(spare, 0)


def _rounded(cells: int) -> int:
    return -(-max(1, cells) // CELL_STEP) * CELL_STEP
