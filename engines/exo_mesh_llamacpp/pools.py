"""Where sequences lie: contexts of several sizes, each with room for sequences of at most so many positions.

The library reserves the memory of a context when it is made. So a short sequence goes to a context of short ones, and
moves to a larger one when it outgrows it; a context that is full of sequences is made again with more slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from exo_mesh.engine.contract import LEAST_SHARED
from exo_mesh.errors import EngineError
from exo_mesh_llamacpp.context import LlamaContext
from exo_mesh_llamacpp.shared.groups import CellGroup, MakeShared, new_group, regrouped
from exo_mesh_llamacpp.shared.pool import Held, Pool

FIRST_CELLS = 512
"""Positions of the smallest sequences' room. A multiple of 256, to which the library rounds."""

FIRST_SLOTS = 4
"""Slots of the first context, if idle contexts may take that much memory: a context that is made again for each new
chat costs it 100 ms."""

FACTOR = 2
"""Each size is this many times the previous size."""

LARGER = 4
"""A sequence takes a free slot of a context up to this many times as large as it needs: that memory is reserved anyway,
and sequences of one context compute together, which reads the weights once for all of them."""

MAX_SLOTS = 256
"""LLAMA_MAX_SEQ."""

MAX_SLOTS_OF_WINDOWS = (MAX_SLOTS - 1) // 2
"""With windows, the library counts each sequence twice, and has one more."""

MakeContext = Callable[[int, int], LlamaContext]
"""Makes a context of (slots, cells)."""


GATHER_AFTER = 2
"""Passes of the same scattered sequences, after which they are moved together."""

MAX_SCATTERED = 16
"""Sets of scattered sequences that a pool counts at once."""

GATHER_PAUSE = 16
"""Passes of a pool after a move before the next one: a move copies what the sequences hold."""


class Sharing(msgspec.Struct, frozen=True):
    """How sequences share cells. make: see MakeShared. most_foreign: cells of a group that a sequence may have to pass
    over because they are not its own, on the average. The same for all stages of a model, because bits depend on it.
    least: positions of the shortest common beginning that is shared."""

    make: MakeShared
    most_foreign: int
    least: int = LEAST_SHARED


class Pools:
    """All sequences of a stage. make_context: see MakeContext. context_limit: of the instance."""

    def __init__(
        self,
        make_context: MakeContext,
        context_limit: int,
        idle_limit: int = FIRST_CELLS,
        sharing: Sharing | None = None,
        most_slots: int = MAX_SLOTS,
    ) -> None:
        """idle_limit: positions that contexts without sequences may keep room for, until they are used again.
        sharing: None if no sequences share cells."""
        self.sharing = sharing
        self._make = make_context
        self._most_slots = most_slots
        self._idle_limit = max(idle_limit, FIRST_CELLS)
        self._largest = -(-max(1, context_limit) // 256) * 256
        self._pools: dict[int, Pool] = {}
        self._slots: dict[int, int] = {}
        """Slots that a pool had when it was last freed, by its cells: the next burst may be as large."""
        self.held: dict[int, Held] = {}

    def reserve(self, held: Held, length: int) -> tuple[Pool, int]:
        """Make room for a sequence of `length` positions, with its held positions. Raises EngineError without
        memory."""
        if held.place and isinstance(held.place[0], CellGroup):
            return self._reserve_shared(held.place[0], held, length)
        if held.place and held.place[0].cells >= length:
            return held.place
        cells = FIRST_CELLS
        while cells < length:
            cells *= FACTOR
        pool = self._with_room(min(cells, max(self._largest, length + -length % 256)))
        slot = pool.free_slot
        assert slot is not None, "a pool with room has a free slot"
        pool.taken.add(slot)
        before, held.place = held.place, (pool, slot)
        if before:
            if held.length and not before[0].context.move_to(before[1], pool.context, slot, held.settled):
                raise EngineError("the state of a sequence could not be moved")
            held.floor = held.settled or held.length
            self._leave(before)
        else:
            pool.context.cut(slot, 0)
        return held.place

    def release(self, sequence: int) -> None:
        """Forget a sequence."""
        held = self.held.pop(sequence, None)
        if held and held.place:
            self._leave(held.place)

    @property
    def num_cells(self) -> int:
        """Positions that are reserved for all sequences. From any thread."""
        places = [held.place for held in list(self.held.values()) if held.place]
        groups = {id(pool): pool.cells for pool, _ in places if isinstance(pool, CellGroup)}
        return sum(groups.values()) + sum(pool.cells for pool, _ in places if not isinstance(pool, CellGroup))

    def share(self, source: Held, new: Held, upto: int) -> None:
        """Begin a sequence with the first positions of another one, which the two then hold together as far as that
        does not slow them down. Raises EngineError without memory; then nothing has changed."""
        assert self.sharing is not None and source.place is not None
        pool, slot = source.place
        if pool.context.length(slot) < upto:
            raise EngineError(f"the library holds less than {upto} positions of this sequence")
        most = self.sharing.most_foreign // 2  # the rest is for what they compute
        if isinstance(pool, CellGroup) and pool.free_slot is not None and pool.foreign(upto) <= most:
            new.place, new.length = (pool, pool.begin(slot, upto)), upto
            return
        comes_too = source.length - upto <= most  # then further copies of it join the new group
        state = pool.context.save(slot) if comes_too else pool.beginning(slot, upto)
        length = source.length if comes_too else upto
        group = new_group(self.sharing.make, length)
        if not group.context.restore(0, state):
            group.context.free()
            raise EngineError("the state of a sequence could not be moved")
        group.runs.extend(0, length)
        group.taken.add(0)
        new.place, new.length = (group, 0), upto
        if comes_too:
            self._leave(source.place)
            source.place, new.place = (group, 0), (group, group.begin(0, upto))

    def _reserve_shared(self, group: CellGroup, held: Held, length: int) -> tuple[Pool, int]:
        """`reserve` for a sequence of a group. May give some sequences of the group other places."""
        assert self.sharing is not None
        more = length - group.runs.length(held.slot)
        if group.runs.used + more > group.cells:
            with suppress(EngineError):  # without memory for two groups, it stays one and is slower
                self._divide(group, more)
            place = held.place
            if place and isinstance(place[0], CellGroup):
                group = place[0]
            else:
                return self.reserve(held, length)
        if group.runs.used + more > group.cells:
            members = list(self._in(group))
            if len(members) == 1:  # elsewhere it computes together with other sequences
                self._take_out(group, held)
                return self.reserve(held, length)
            group = self._replace(group, members, more)
        group.runs.extend(held.slot, more)
        return group, held.slot

    def _divide(self, group: CellGroup, more: int) -> None:
        """Take the sequences with the most positions of their own out of a group in which sequences have too many cells
        beside their own ones."""
        members = list(self._in(group))
        if self.sharing is None or len(members) < 2 or group.foreign() <= self.sharing.most_foreign:
            return
        crowding = group.crowding(members)
        if len(crowding) > 1:
            self._replace(group, crowding, more)
        else:
            self._take_out(group, crowding[0])
        rest = list(self._in(group))
        if rest:
            self._replace(group, rest, more)

    def _replace(self, group: CellGroup, members: Sequence[Held], more: int) -> CellGroup:
        """Move sequences of a group to a new group with room for so many positions more; returns it."""
        assert self.sharing is not None
        made, slots = regrouped(self.sharing.make, group, members, more)
        for held in members:
            slot = held.slot
            held.place = (made, slots[slot])
            self._leave((group, slot))
        return made

    def _take_out(self, group: CellGroup, held: Held) -> None:
        """Move a sequence of a group to a place of its own."""
        slot = held.slot
        state, length = _state_in(group, slot), group.runs.length(slot)
        held.place = None
        try:
            pool, place = self.reserve(held, length)
        except EngineError:
            held.place = (group, slot)
            raise
        if state is not None and not pool.context.restore(place, state):
            held.place = (group, slot)
            self._leave((pool, place))
            raise EngineError("the state of a sequence could not be moved")
        self._leave((group, slot))

    def prepare(self) -> None:
        """Make the smallest context, so that a stage which cannot compute says so while it loads."""
        self._with_room(min(FIRST_CELLS, self._largest))

    def gather(self, members: Sequence[Held]) -> None:
        """Move sequences that compute together to neighbouring slots, if they often come together.

        The library computes only neighbouring slots in one pass, and each pass reads all weights. members: of one pool,
        with places.
        """
        places = [held.place for held in members if held.place]
        pool = places[0][0]
        slots = tuple(sorted(slot for _, slot in places))
        pool.pause = max(0, pool.pause - 1)
        if pool.context.unified or slots[-1] - slots[0] < len(slots):
            return
        if slots not in pool.scattered and len(pool.scattered) >= MAX_SCATTERED:
            pool.scattered.clear()
        pool.scattered[slots] = pool.scattered.get(slots, 0) + 1
        if pool.scattered[slots] >= GATHER_AFTER and not pool.pause:
            self._move(pool, _moves(slots, pool.context.slots))
            pool.scattered.clear()
            pool.pause = GATHER_PAUSE

    def _move(self, pool: Pool, moves: Mapping[int, int]) -> None:
        """Give sequences other slots, {from: to}. Sequences in the way are among them."""
        moved = [held for held in self._in(pool) if held.place and held.place[1] in moves]
        states = [_state_in(pool, held.place[1]) if held.place else None for held in moved]
        for held in moved:
            assert held.place is not None
            pool.context.cut(held.place[1], 0)
            pool.taken.discard(held.place[1])
        for held, state in zip(moved, states, strict=True):
            assert held.place is not None
            slot = moves[held.place[1]]
            held.place = (pool, slot)
            pool.taken.add(slot)
            if state is not None and not pool.context.restore(slot, state):
                raise EngineError("the state of a sequence could not be moved")

    def close(self) -> None:
        for sequence in list(self.held):
            self.release(sequence)  # frees groups
        for pool in self._pools.values():
            pool.context.free()
        self._pools.clear()

    def _leave(self, place: tuple[Pool, int]) -> None:
        pool, slot = place
        pool.leave(slot)
        if isinstance(pool, CellGroup):
            if not pool.taken:
                pool.context.free()
        elif not pool.taken and self._idle_cells() > self._idle_limit:
            pool.context.free()
            self._slots[pool.cells] = pool.context.slots
            del self._pools[pool.cells]

    def _idle_cells(self) -> int:
        return sum(pool.cells * pool.context.slots for pool in self._pools.values() if not pool.taken)

    def _with_room(self, cells: int) -> Pool:
        """A pool of that size or somewhat larger, with a free slot."""
        larger = [pool for pool in self._pools.values() if pool.taken and cells < pool.cells <= LARGER * cells]
        for other in sorted(larger, key=lambda pool: -pool.cells):
            if other.free_slot is not None:
                return other
        pool = self._pools.get(cells)
        if pool is None:
            first = min(FIRST_SLOTS, self._idle_limit // cells) if cells == FIRST_CELLS else 1
            pool = self._pools[cells] = Pool(cells, self._make(max(1, first, self._slots.get(cells, 1) // 2), cells))
        elif pool.free_slot is None:
            self._widen(pool)
        return pool

    def _widen(self, pool: Pool) -> None:
        """Make a pool again with twice the slots: each time, a new chat waits 50 to 100 ms for the copies."""
        if pool.context.slots >= self._most_slots:
            raise EngineError(f"more than {self._most_slots} sequences of up to {pool.cells} positions")
        slots = pool.context.slots
        larger = self._make(min(self._most_slots, 2 * slots), pool.cells)
        for held in self._in(pool):
            slot = held.place[1] if held.place else 0
            if pool.context.length(slot) and not pool.context.move_to(slot, larger, slot, held.settled):
                larger.free()
                raise EngineError("the state of a sequence could not be moved")
            held.floor = held.settled or held.length
        pool.context.free()
        pool.context = larger

    def _in(self, pool: Pool) -> Iterator[Held]:
        return (held for held in self.held.values() if held.place and held.place[0] is pool)


def _state_in(pool: Pool, slot: int) -> np.ndarray | None:
    """The state of a slot; None if nothing has been computed there, as of a prompt that begins in this frame: the
    library saves an empty recurrent state, but refuses to restore it."""
    return pool.context.save(slot) if pool.context.length(slot) else None


def _moves(slots: Sequence[int], num_slots: int) -> dict[int, int]:
    """{from: to} that brings `slots` side by side with the fewest moves; those in their way go where they were."""
    group = set(slots)
    start = max(range(num_slots - len(slots) + 1), key=lambda first: len(group & set(range(first, first + len(slots)))))
    block = set(range(start, start + len(slots)))
    coming, going = sorted(group - block), sorted(block - group)
    return {**dict(zip(coming, going, strict=True)), **dict(zip(going, coming, strict=True))}
