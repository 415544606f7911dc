"""Which positions the sequences of a group hold together, and how many cells they need. Pure."""

from __future__ import annotations

from itertools import takewhile


class _Run:
    """Consecutive positions that `holders` hold together, each behind the runs before it in its list."""

    __slots__ = ("holders", "length")

    def __init__(self, length: int, holders: set[int]) -> None:
        self.length = length
        self.holders = holders


class SharedRuns:
    """The positions of each slot as a list of runs. used: held positions; a position of several slots counts once."""

    def __init__(self) -> None:
        self.used = 0
        self._of: dict[int, list[_Run]] = {}

    def length(self, slot: int) -> int:
        """Positions of a slot; 0 if it is unknown."""
        return sum(run.length for run in self._of.get(slot, ()))

    def own(self, slot: int) -> int:
        """Positions that no other slot holds."""
        return sum(run.length for run in self._of.get(slot, ()) if len(run.holders) == 1)

    def common(self, slot: int, other: int) -> int:
        """Positions that both slots hold together."""
        return sum(run.length for run in takewhile(lambda run: other in run.holders, self._of.get(slot, ())))

    def extend(self, slot: int, count: int) -> None:
        """Append positions to a slot, or begin it."""
        if count < 1:
            return
        runs = self._of.setdefault(slot, [])
        if runs and len(runs[-1].holders) == 1:
            runs[-1].length += count
        else:
            runs.append(_Run(count, {slot}))
        self.used += count

    def copy(self, source: int, slot: int, upto: int) -> None:
        """Begin an unknown slot with the first `upto` positions of another one, which has as many."""
        kept = self._split(source, upto)
        for run in self._of[source][:kept]:
            run.holders.add(slot)
        self._of[slot] = self._of[source][:kept]

    def cut(self, slot: int, length: int) -> None:
        """Forget the positions of a slot from `length` on. An unknown slot, or a shorter one, stays as it is."""
        if slot not in self._of:
            return
        kept = self._split(slot, length)
        for run in self._of[slot][kept:]:
            run.holders.discard(slot)
            if not run.holders:
                self.used -= run.length
        del self._of[slot][kept:]
        if not kept:
            del self._of[slot]

    def _split(self, slot: int, position: int) -> int:
        """Make a run of a slot end at a position, for all slots that hold it; returns the number of runs before the
        position."""
        at = 0
        for index, run in enumerate(self._of[slot]):
            if at >= position:
                return index
            if at + run.length > position:
                rest = _Run(at + run.length - position, set(run.holders))
                run.length -= rest.length
                for holder in run.holders:
                    runs = self._of[holder]
                    runs.insert(runs.index(run) + 1, rest)
                return index + 1
            at += run.length
        return len(self._of[slot])
