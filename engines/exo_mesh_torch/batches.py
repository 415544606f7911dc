"""Decides which sequences share a KV cache. Sequences that decode together are joined once and then stay joined.

Appending to a joined cache costs the same as to a single one. Taking it apart or joining copies KV, so it is done only
when a forward has other sequences than the joined ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import CUT_POSITIONS, LEAST_SHARED, MOST_PARTS
from exo_mesh.errors import EngineError
from exo_mesh_torch.caches import CachePlan, StageCache, States

OWN_TAIL = 64
"""Positions at the end of a row that never become a part just for a batch: rejected drafts are cut back there."""


class Batch(msgspec.Struct):
    """Sequences whose KV is in one cache, row by row. lengths[i]: positions that row i holds. length: with padding.
    The row of a removed sequence stays until the batch is taken apart."""

    sequences: list[int]
    lengths: list[int]
    cache: StageCache

    @property
    def length(self) -> int:
        return max(self.cache.shared) + max(self.own_lengths)

    @property
    def own_lengths(self) -> list[int]:
        """For each row the positions behind its parts."""
        return [length - shared for length, shared in zip(self.lengths, self.cache.shared, strict=True)]


class EarlierStates(NamedTuple):
    """The recurrent states of a sequence when it held `length` positions."""

    length: int
    states: States


class Batches:
    """The KV of all sequences of a stage."""

    def __init__(self, plan: CachePlan) -> None:
        self._plan = plan
        self._of: dict[int, Batch] = {}
        self._pasts: dict[int, list[EarlierStates]] = {}
        """By sequence: the states before its rows with drafts, while these are not judged."""
        self.least_shared = 0
        """Sequences share a common beginning of at least so many positions; 0: none."""

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._of

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._of))

    def begin(self, sequence: int) -> None:
        """Begin an empty sequence, also in place of an existing one."""
        self.remove(sequence)
        self._of[sequence] = Batch([sequence], [0], self._plan.new())

    def put(self, sequence: int, length: int, cache: StageCache) -> None:
        """Store a sequence of `length` positions with a cache of one row."""
        self.remove(sequence)
        self._of[sequence] = Batch([sequence], [length], cache)

    def remove(self, sequence: int) -> None:
        batch = self._of.pop(sequence, None)
        self._pasts.pop(sequence, None)
        # rows of removed sequences are dropped as soon as they are half of the batch
        if batch is not None and len(batch.sequences) > 1:
            left = [other for other in batch.sequences if self._of.get(other) is batch]
            if 2 * len(left) <= len(batch.sequences):
                self._take_apart(batch)

    def length(self, sequence: int) -> int:
        batch = self._of[sequence]
        return batch.lengths[batch.sequences.index(sequence)]

    def can_cut(self, sequence: int, length: int) -> bool:
        """Whether a sequence can be cut back to `length` positions."""
        surplus, cache = self.length(sequence) - length, self._of[sequence].cache
        if not surplus or cache.can_cut(surplus):
            return True
        return self._past(sequence, length) is not None and cache.can_cut_positions(surplus)

    def single(self, sequence: int) -> StageCache:
        """The cache of one sequence alone; taken apart from others if need be."""
        batch = self._of[sequence]
        if len(batch.sequences) > 1:
            self._take_apart(batch)
        return self._of[sequence].cache

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Begin a sequence with the first positions of another one; joined sequences stay joined. Raises EngineError,
        changing nothing, if the KV cannot be copied or cut back."""
        held, batch = self.length(source), self._of[source]
        if not length:
            self.begin(sequence)
            return
        if not batch.cache.copyable:
            raise EngineError("this model has a kind of KV that cannot be copied")
        if length < held and not batch.cache.can_cut(held - length):
            raise EngineError(f"KV of {held} positions cannot be cut back to {length}")
        with torch.inference_mode():
            if self.least_shared:
                cache = self._shared(source, length)
            else:
                cache = batch.cache.row(batch.sequences.index(source), held)
                cache.cut(held - length)
        self.put(sequence, length, cache)

    def move(self, source: int, sequence: int, length: int) -> None:
        """Begin a sequence with the first positions of another one, which ends; a joined one is copied. Raises
        EngineError as `copy` does."""
        batch = self._of[source]
        if len(batch.sequences) > 1 or not length:
            self.copy(source, sequence, length)
            self.remove(source)
            return
        self._cut(batch, batch.length - length)
        del self._of[source]
        self._pasts.pop(source, None)
        self.put(sequence, length, batch.cache)

    def _shared(self, source: int, length: int) -> StageCache:
        """A cache with the first positions of a sequence. What the two have in common becomes a part, if it is long."""
        batch = self._of[source]
        index = batch.sequences.index(source)
        more = length - batch.cache.shared[index]
        if more >= self.least_shared and len(batch.cache.serials(index)) < MOST_PARTS:
            self.single(source).part_off(more)
            batch, index = self._of[source], 0
        return batch.cache.begin(index, batch.lengths[index], length)

    def before(self, rows: Sequence[Row]) -> Batch:
        """One batch of the sequences of these rows, each cut back to where its row begins, with what is needed to cut
        the rows back. The order of its rows may differ."""
        batch = self.together({row.sequence: row.pos0 for row in rows})
        for row in rows:
            least = row.pos0 - CUT_POSITIONS
            kept = self._pasts.pop(row.sequence, ())
            kept = [past for past in kept if row.drafted and least <= past.length < row.pos0]
            if row.may_be_refused and row.pos0:
                with torch.inference_mode():
                    states = batch.cache.copy_states(batch.sequences.index(row.sequence))
                if states:
                    kept.append(EarlierStates(row.pos0, states))
            if kept:
                self._pasts[row.sequence] = kept
        return batch

    def together(self, lengths: dict[int, int]) -> Batch:
        """One batch of these sequences, each cut back to the given length. The order of its rows may differ."""
        batch = self._of[next(iter(lengths))]
        if set(batch.sequences) == set(lengths) and all(self._of[sequence] is batch for sequence in lengths):
            surplus = {batch.lengths[i] - lengths[sequence] for i, sequence in enumerate(batch.sequences)}
            if len(surplus) == 1 and min(batch.own_lengths) >= max(surplus):
                self._cut(batch, surplus.pop())
                return batch
        parts = []
        for sequence, length in lengths.items():
            self.single(sequence)
            self._cut(self._of[sequence], self._of[sequence].length - length)
            parts.append(self._of[sequence])
        return parts[0] if len(parts) == 1 else self._join(parts)

    def num_bytes(self) -> int:
        """Bytes of all buffers; parts count once, however many sequences hold them."""
        batches = {id(batch): batch for batch in list(self._of.values())}.values()
        memory = [tensor.untyped_storage() for batch in batches for tensor in batch.cache.tensors()]
        pasts = [past for kept in list(self._pasts.values()) for past in kept]
        states = [state for past in pasts for one in past.states.values() for state in one.values()]
        memory += [state.untyped_storage() for state in states]
        return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())

    def _cut(self, batch: Batch, surplus: int) -> None:
        if surplus:
            pasts = [self._past(s, n - surplus) for s, n in zip(batch.sequences, batch.lengths, strict=True)]
            returns = not batch.cache.can_cut(surplus)
            if returns and not (all(pasts) and batch.cache.can_cut_positions(surplus)):
                raise EngineError(f"KV of {batch.length} positions cannot be cut back by {surplus}")
            if min(batch.own_lengths) < surplus:  # only of one sequence: see `together`
                with torch.inference_mode():
                    batch.cache.own()
            batch.cache.cut(surplus)
            for index, past in enumerate(pasts if returns else ()):
                if past is not None:
                    with torch.inference_mode():
                        batch.cache.return_to(index, past.states)
            batch.lengths = [length - surplus for length in batch.lengths]

    def _past(self, sequence: int, length: int) -> EarlierStates | None:
        return next((past for past in self._pasts.get(sequence, ()) if past.length == length), None)

    def _take_apart(self, batch: Batch) -> None:
        with torch.inference_mode():
            for index, (sequence, length) in enumerate(zip(batch.sequences, batch.lengths, strict=True)):
                if self._of.get(sequence) is batch:
                    self._of[sequence] = Batch([sequence], [length], batch.cache.row(index, length))

    def _join(self, parts: Sequence[Batch]) -> Batch:
        parts = self._in_order(parts) if any(part.cache.shared[0] for part in parts) else parts
        length = max(part.cache.shared[0] for part in parts) + max(part.own_lengths[0] for part in parts)
        with torch.inference_mode():
            cache = parts[0].cache.join([part.cache for part in parts[1:]], length)
        batch = Batch([part.sequences[0] for part in parts], [part.lengths[0] for part in parts], cache)
        for sequence in batch.sequences:
            self._of[sequence] = batch
        return batch

    def _in_order(self, rows: Sequence[Batch]) -> list[Batch]:
        """Rows with the same parts side by side. Of a row that is much longer than another one, all but the end becomes
        a part: else its own positions would be the width of all rows."""
        shortest = min(row.own_lengths[0] for row in rows)
        for row in rows:
            more = row.own_lengths[0] - shortest - OWN_TAIL
            if more >= LEAST_SHARED and len(row.cache.serials(0)) < MOST_PARTS:
                with torch.inference_mode():
                    row.cache.part_off(more)
        return sorted(rows, key=lambda row: row.cache.serials(0))
