"""A pool of sequences in one context of the library, and what a stage knows of each sequence."""

from __future__ import annotations

import msgspec
import numpy as np

from exo_mesh.errors import EngineError
from exo_mesh_llamacpp.context import LlamaContext


class Pool(msgspec.Struct, eq=False):
    """The context for sequences of up to `cells` positions. taken: the slots in use. scattered: how often which slots
    computed together that are not side by side. pause: passes until slots may move again."""

    cells: int
    context: LlamaContext
    taken: set[int] = msgspec.field(default_factory=set)
    scattered: dict[tuple[int, ...], int] = msgspec.field(default_factory=dict)
    pause: int = 0

    @property
    def free_slot(self) -> int | None:
        return next((slot for slot in range(self.context.slots) if slot not in self.taken), None)

    def cut(self, slot: int, length: int) -> bool:
        """Forget the positions of a slot from `length` on. False if its state cannot go back."""
        return self.context.cut(slot, length)

    def beginning(self, slot: int, upto: int) -> np.ndarray:
        """The state of the first positions of a slot, which stays as it is. Raises EngineError if that fails."""
        whole = self.context.save(slot)
        if self.context.length(slot) == upto:
            return whole
        self.context.cut(slot, upto)
        state = self.context.save(slot)
        if not self.context.restore(slot, whole):
            raise EngineError("the state of a sequence could not be read in part")
        return state

    def leave(self, slot: int) -> None:
        """Forget a slot."""
        self.cut(slot, 0)
        self.taken.discard(slot)


class Held(msgspec.Struct):
    """A sequence. length: positions that it holds; place: its pool and slot, None until it holds any. settled:
    positions that no later row cuts back. guarded: positions that are protected, see LlamaContext. floor: positions
    before which its place lacks some of the windows, because it has been moved or restored. pasts: {length:
    recurrent state} before its rows with drafts, while these are not judged."""

    max_tokens: int
    length: int = 0
    place: tuple[Pool, int] | None = None
    settled: int = 0
    guarded: int = 0
    floor: int = 0
    pasts: dict[int, np.ndarray] = msgspec.field(default_factory=dict)

    @property
    def slot(self) -> int:
        assert self.place is not None, "a sequence with positions has a place"
        return self.place[1]
