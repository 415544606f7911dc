"""Shares the prompt of several requests: one of them computes it, and the others begin as copies of that one.

A copy is made of all positions but the last of the prompt, as soon as the frames that compute them have left. Ops and
rows are done in order at every stage, so the source holds exactly these positions there, and every kind of KV can be
copied. The first decode row of each copy is its own. No request waits for one that has ended, failed or lost its place:
the next request then computes the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from exo_mesh.domain.frame import Copy
from exo_mesh.rings.runner.prefix.index import BLOCK_TOKENS, common_tokens, content_of
from exo_mesh.rings.runner.scheduling.sequence import Sequence


class _Made(msgspec.Struct):
    """A copy that has not come round yet. step: of the frame that carries it; 0 before it leaves. saves: prompt tokens
    that need not be computed."""

    op: Copy
    step: int = 0
    saves: int = 0


class SharedPrompts(msgspec.Struct):
    """Decides which sequences wait for another one, and keeps the copies that are on their way. saved_tokens: prompt
    tokens that were copied instead of computed."""

    saved_tokens: int = 0
    _made: dict[int, _Made] = msgspec.field(default_factory=dict)

    def must_wait(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a sequence that has just got its place becomes a copy; if so, `ready` yields it later."""
        if _can_follow(sequence):
            sequence.source = _source(sequence, running)
        return sequence.waits

    def must_follow(self, sequence: Sequence, known: int, running: Iterable[Sequence]) -> bool:
        """Whether a new sequence waits for another request that is computing more of its prompt than the `known`
        positions which stages hold; if so, `ready` yields it as soon as that part is computed. Only for KV that can be
        cut back."""
        limit = len(sequence.tokens) - 1 - sequence.forced
        if sequence.share_id or not sequence.may_begin_as_copy or limit <= known:
            return False
        content = content_of(sequence.content(limit))
        for other in running:
            if other is sequence or not other.prefill_left or not other.is_kept:
                continue
            if other.cache_scope != sequence.cache_scope:
                continue
            stop = other.computed + other.prefill_left
            common = common_tokens(content_of(other.content(stop)), content)
            if common >= known + BLOCK_TOKENS:
                sequence.source, sequence.num_shared, known = other, common, common
        return sequence.waits

    def ready(self, running: Iterable[Sequence]) -> Iterator[tuple[Sequence, Sequence | None]]:
        """The sequences that no longer wait, each with the sequence to copy, or with None if it has to compute its
        prompt. The caller makes the copy or begins the sequence before it takes the next item."""
        if not [sequence for sequence in running if sequence.source is not None]:  # nearly always, and each frame asks
            return
        by_id = {sequence.id: sequence for sequence in running}
        for sequence in by_id.values():
            if sequence.source is None:
                continue
            if sequence.source.id not in by_id:
                # choices of one request take another source; other requests look into the prefix cache again
                sequence.source = _source(sequence, by_id.values()) if sequence.share_id else None
            source = sequence.source
            if source is None or source.computed >= sequence.num_shared:
                sequence.source = None
                yield sequence, source

    def made(self, op: Copy, *, saves: int = 0) -> Copy:
        """Note a copy as on its way. saves: prompt tokens that need not be computed because of it."""
        self._made[op.sequence] = _Made(op, saves=saves)
        return op

    def sent(self, step: int) -> None:
        """Note that all copies made so far have left with this frame, or before."""
        for made in self._made.values():
            made.step = made.step or step

    def came_round(self, step: int) -> int:
        """Note that the copies of this frame are at every stage. Returns how many there were."""
        if not self._made:  # nearly always, and each frame asks
            return 0
        came = [sequence_id for sequence_id, made in self._made.items() if made.step == step]
        for sequence_id in came:
            self.saved_tokens += self._made.pop(sequence_id).saves
        return len(came)

    def source_of(self, sequence_id: int) -> int | None:
        """The source of a copy that is still in flight; else None."""
        made = self._made.get(sequence_id)
        return None if made is None else made.op.source

    def copies_of(self, source_id: int) -> list[int]:
        """The copies of a sequence that are on their way: if the sequence has a fault, its copies may be wrong."""
        return [sequence_id for sequence_id, made in self._made.items() if made.op.source == source_id]

    def forget(self, sequence_id: int) -> None:
        """Forget a sequence that has ended, or continues under another id."""
        self._made.pop(sequence_id, None)

    def lose(self) -> list[int]:
        """Forget all copies on their way, because no frame comes round any more. Returns the sequences whose KV is not
        at every stage."""
        lost = list(self._made)
        self._made.clear()
        return lost


def _can_follow(sequence: Sequence) -> bool:
    """Whether a sequence can wait for a copy: not if stages hold KV of it already, or if logits of its prompt are
    wanted."""
    return bool(sequence.share_id) and sequence.num_shared > 0 and sequence.may_begin_as_copy


def _source(sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
    """The running sequence that has computed most of the same prompt."""
    size = sequence.num_shared
    sources = [
        other
        for other in running
        if other.share_id == sequence.share_id
        and other is not sequence
        and not other.waits
        and other.num_shared == size
        and other.content(size + 1) == sequence.content(size + 1)
    ]
    return max(sources, key=lambda other: other.computed, default=None)
