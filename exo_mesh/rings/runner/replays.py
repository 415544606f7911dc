"""Answers that a driver keeps under an idempotency key, so that a client whose entry peer died can get them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from exo_mesh.domain.replay import Kept, ReplayStore
from exo_mesh.domain.request import GenerateRequest, TokenEvent, Tokens

AT_ONCE = 256
"""Events of one message: with 20 log-probabilities each that is 60 KiB."""


class Replays:
    """The kept answers. One sequence at a time works on a key: a repeated request takes it over."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._store = ReplayStore()
        self._now = now
        self._workers: dict[bytes, int] = {}

    def num_tokens(self, key_hash: bytes) -> int | None:
        """The number of tokens kept here of an answer; None if there is no such answer. From any thread."""
        kept = self._store.peek(key_hash)
        return None if kept is None else len(kept)

    def open(self, request: GenerateRequest) -> Kept | None:
        """The kept answer for a request; None if the request has no key. Raises KeyReusedError."""
        return self._store.open(request, self._now()) if request.key_hash else None

    def worker(self, key_hash: bytes) -> int | None:
        """The sequence that works on a key now, if there is one."""
        return self._workers.get(key_hash) if key_hash else None

    def begin(self, request: GenerateRequest, kept: Kept, sequence_id: int) -> tuple[GenerateRequest, list[TokenEvent]]:
        """Note that a sequence works on the answer from now on. Returns the request that continues after everything
        kept, and the kept events that its caller has not received."""
        kept.meet(request.resume_ids)
        if request.begins_with:
            kept.cut(len(request.resume_ids))  # the caller has the text that these tokens must spell, and not them
        if request.num_scores > len(kept.prompt):
            kept.reopen()
        kept.live = True
        events = kept.events(len(request.resume_ids))
        if kept.finish is None:
            self._workers[request.key_hash] = sequence_id
        ids = tuple(kept.ids)
        return replace(request, resume_ids=ids, resumed=request.resumed or bool(ids)), events

    def goes_on(self, key_hash: bytes, sequence_id: int, as_sequence_id: int) -> None:
        """Note that the request of one sequence continues as another sequence."""
        if self._workers.get(key_hash) == sequence_id:
            self._workers[key_hash] = as_sequence_id

    def end(self, key_hash: bytes, kept: Kept, sequence_id: int) -> None:
        """Note that a sequence no longer works on the answer."""
        if self._workers.get(key_hash) == sequence_id:
            del self._workers[key_hash]
            self._store.close(kept, self._now())

    def release(self, kept: Kept) -> None:
        """Note that nothing is added to an answer any more; it is kept for a while."""
        self._store.close(kept, self._now())


def replayed(events: list[TokenEvent]) -> Iterator[Tokens]:
    """Kept events, for a few messages."""
    for start in range(0, len(events), AT_ONCE):
        yield Tokens(tuple(events[start : start + AT_ONCE]))
