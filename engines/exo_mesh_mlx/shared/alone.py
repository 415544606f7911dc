"""Gives a sequence that computes alone arrays of its own for all its positions, as if it shared none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol
from weakref import ReferenceType, ref

PATIENCE = 4
"""Forwards of a sequence alone, one after the other, after which it gets arrays of its own."""


class Assembling(Protocol):
    """The caches of a sequence: see `SequenceCache`."""

    shared: int

    @property
    def parts_in(self) -> frozenset[int]: ...

    def assemble(self) -> bool: ...

    def fold(self) -> None: ...

    def give_up_parts(self) -> None: ...


class LoneSequence:
    """The sequence of the last forwards, if they all had rows of one sequence only. MLX attends fastest to keys in one
    array. So this sequence gets such arrays besides the parts that it holds with others, until another one computes: at
    most one sequence at a time. It gives up parts that no other sequence holds."""

    def __init__(self, everybody: Callable[[], Iterable[Assembling]]) -> None:
        """everybody: gives all sequences of the stage."""
        self._everybody = everybody
        self._last: ReferenceType[Assembling] | None = None
        self._num_forwards = 0

    def note(self, caches: Sequence[Assembling]) -> None:
        """Note the sequences of the next forward."""
        last = self._last() if self._last else None
        if len(caches) == 1 and caches[0] is last:
            self._num_forwards += 1
            if self._num_forwards >= PATIENCE and last.shared and last.assemble():
                self.check_parts()
            return
        if last is not None:
            last.fold()
        self._last, self._num_forwards = (ref(caches[0]) if len(caches) == 1 else None), 1

    def check_parts(self) -> None:
        """Let the assembled sequence give up its parts if no other one holds some of them."""
        last = self._last() if self._last else None
        if last is None or not (held := last.parts_in):
            return
        if all(held.isdisjoint(cache.parts_in) for cache in self._everybody() if cache is not last):
            last.give_up_parts()
