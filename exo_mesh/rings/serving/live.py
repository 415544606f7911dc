"""Keeps the events of the answers that run for clients of this peer, so that others can read them too. In memory only.

Readers read at their own pace; nothing here waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

from exo_mesh.domain.replay import Kept
from exo_mesh.domain.request import Progress, PromptLogprobs, RequestEvent
from exo_mesh.errors import CancelledRequestError, InputError, MeshError, OverloadError
from exo_mesh.rings.serving.streams import FoundStream, StreamCard, StreamViewer

MAX_TOKENS = 2**21
"""Tokens kept of all answers together: 8 MiB of ids. Answers with log-probabilities count LOGPROBS_COUNT times more."""

MAX_READERS_OF_CHOICE = 8
MAX_READERS = 256

MAX_AT_ONCE = 256
"""Most token events that a reader gets at a time."""


class LiveChoice:
    """One answer of a request: its events so far, and its readers."""

    def __init__(self) -> None:
        self._kept = Kept(b"", wants_details=True, at=0.0)
        self._progress: Progress | None = None
        self._is_over = False
        self._error: MeshError | None = None
        self._readers: set[asyncio.Event] = set()

    @property
    def num_tokens(self) -> int:
        return len(self._kept)

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def weight(self) -> int:
        return self._kept.weight

    def add(self, event: RequestEvent) -> int:
        """Keep the next event; returns by how much the weight has grown."""
        if self._is_over:
            return 0
        before = self._kept.weight
        if isinstance(event, Progress):
            self._progress = event
        elif isinstance(event, PromptLogprobs):
            self._kept.prompt += event.entries
        else:
            self._kept.wants_details = event.logprob is not None or bool(self._kept.details)
            self._kept.add(event)
            self._is_over = event.finish is not None
        self._wake()
        return self._kept.weight - before

    def end(self, error: MeshError) -> None:
        """Note that the answer has ended without its last event."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._wake()

    async def follow(self) -> AsyncGenerator[Sequence[RequestEvent], None]:
        """Yield all events from the first on, as they come. Raises the error that the answer ended with."""
        if len(self._readers) >= MAX_READERS_OF_CHOICE:
            raise OverloadError(f"this answer has {len(self._readers)} readers already, and takes no more")
        changed = asyncio.Event()
        self._readers.add(changed)
        num_prompt = num_tokens = 0
        progress: Progress | None = None
        try:
            while True:
                changed.clear()
                if fresh := self._kept.prompt[num_prompt : num_prompt + MAX_AT_ONCE]:
                    num_prompt += len(fresh)
                    yield [PromptLogprobs(tuple(fresh))]
                elif num_tokens < len(self._kept) or self._kept.finish is not None:
                    events = self._kept.events(num_tokens)[:MAX_AT_ONCE]
                    num_tokens += len(events)
                    yield events
                    if events[-1].finish is not None:
                        return
                elif self._error is not None:
                    raise self._error
                elif self._progress is not progress and not num_tokens:
                    progress = self._progress
                    assert progress is not None
                    yield [progress]
                else:
                    await changed.wait()
        finally:
            self._readers.discard(changed)

    def _wake(self) -> None:
        for reader in self._readers:
            reader.set()


class LiveStreams:
    """The running answers of this peer, by id."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._cards: dict[str, StreamCard] = {}
        self._opened: list[StreamCard] = []
        """All open cards, also cards that can no longer be found by their id."""
        self._choices: dict[str, LiveChoice] = {}
        self._max_tokens = max_tokens
        self._weight = 0

    @contextmanager
    def open(self, card: StreamCard) -> Iterator[None]:
        """Let the answer be found while it runs. An earlier answer with the same id can no longer be found."""
        choices = {request_id: LiveChoice() for request_id in card.request_ids}
        self._cards[card.id] = card
        self._opened.append(card)
        self._choices |= choices
        try:
            yield
        finally:
            self._opened.remove(card)
            if self._cards.get(card.id) is card:
                del self._cards[card.id]
            for request_id, choice in choices.items():
                choice.end(CancelledRequestError(f"request {card.id} was cancelled"))
                self._weight -= choice.weight
                if self._choices.get(request_id) is choice:
                    del self._choices[request_id]

    def choice(self, request_id: str) -> LiveChoice | None:
        """The answer that keeps the events of a request, if others may read it."""
        return self._choices.get(request_id)

    def add(self, choice: LiveChoice, event: RequestEvent) -> None:
        """Keep an event, unless too much is kept already: readers of this answer then get an error."""
        if self._weight >= self._max_tokens and not isinstance(event, Progress):
            choice.end(OverloadError("this peer keeps too many tokens of running answers to share this one"))
            return
        self._weight += choice.add(event)

    def find(self, viewer: StreamViewer, stream_id: str = "", peer_id: str = "") -> list[FoundStream]:
        """The answers that the viewer may see; with an id only that answer, with its recipe."""
        cards = list(self._cards.values()) if not stream_id else filter(None, [self._cards.get(stream_id)])
        return [
            FoundStream(
                peer_id,
                card.id,
                card.model,
                card.created,
                card.request_ids,
                sum(self._choices[one].num_tokens for one in card.request_ids if one in self._choices),
                card.recipe() if stream_id else b"",
                card.key_id,
            )
            for card in cards
            if viewer.may_see(card)
        ]

    def follow(
        self, viewer: StreamViewer, stream_id: str, request_id: str
    ) -> AsyncGenerator[Sequence[RequestEvent], None]:
        """Follow an answer, see LiveChoice.follow. Raises InputError if the viewer may see no such answer, and
        OverloadError."""
        card, choice = self._cards.get(stream_id), self._choices.get(request_id)
        if card is None or choice is None or request_id not in card.request_ids or not viewer.may_see(card):
            raise InputError(f"this peer has no running answer {stream_id}", param="id")
        if sum(one.num_readers for one in self._choices.values()) >= MAX_READERS:
            raise OverloadError("the running answers of this peer have too many readers already")
        return choice.follow()
