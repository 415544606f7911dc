"""Counts the positions that sequences hold together: a copy shares the beginning of its source. Pure.

The driver, every stage and engines that only count keep one each, from the same operations in the same order. The
driver and the stages begin again with every plan.
"""

from __future__ import annotations

from exo_mesh.domain.frame import Copy, Op, Remove, UnknownOp
from exo_mesh.engine.contract import MOST_PARTS


class _HeldRun:
    """Positions that `holders` hold together, each after the parts that come before it in its list."""

    __slots__ = ("holders", "length")

    def __init__(self, length: int, holders: set[int]) -> None:
        self.length = length
        self.holders = holders


class SharedPositions:
    """The parts of all sequences. least: positions of the shortest part, see Capabilities.shares_from; 0: copies share
    nothing. saved: positions of all sequences that are in memory of others: the sum of their lengths minus this is what
    they take."""

    def __init__(self, least: int = 0) -> None:
        self.least = least
        self.saved = 0
        self._of: dict[int, list[_HeldRun]] = {}

    def note(self, op: Op | UnknownOp) -> None:
        """Note an operation of a frame, if it begins or ends sequences."""
        if isinstance(op, Copy):
            self.remove(op.sequence)
            if not op.first_stage and not op.disk:  # else some stages compute its first positions, or read them
                self.copy(op.source, op.sequence, op.upto)
        elif isinstance(op, Remove):
            self.remove(op.sequence)

    def copy(self, source: int, sequence: int, upto: int) -> None:
        """Note that a new sequence begins with the first `upto` positions of another one."""
        if not self.least:
            return
        parts, at = self._of.setdefault(source, []), 0
        taken: list[_HeldRun] = []
        for part in list(parts):
            if at + part.length > upto:
                break
            taken.append(part)
            at += part.length
        if upto - at >= self.least:
            if len(taken) < len(parts):
                taken.append(self._split(parts[len(taken)], upto - at))
            elif len(parts) < MOST_PARTS:
                parts.append(_HeldRun(upto - at, {source}))
                taken.append(parts[-1])
        for part in taken:
            part.holders.add(sequence)
            self.saved += part.length
        if taken:
            self._of[sequence] = taken
        if not parts:
            del self._of[source]

    def _split(self, part: _HeldRun, length: int) -> _HeldRun:
        """Cut a part in two, for all that hold it; returns the first piece."""
        rest = _HeldRun(part.length - length, set(part.holders))
        part.length = length
        for holder in part.holders:
            parts = self._of[holder]
            parts.insert(parts.index(part) + 1, rest)
        return part

    def remove(self, sequence: int) -> None:
        """Note the end of a sequence; an unknown one changes nothing."""
        for part in self._of.pop(sequence, ()):
            part.holders.discard(sequence)
            if part.holders:
                self.saved -= part.length

    def clear(self) -> None:
        self._of.clear()
        self.saved = 0

    def __len__(self) -> int:
        """The number of sequences that hold parts."""
        return len(self._of)
