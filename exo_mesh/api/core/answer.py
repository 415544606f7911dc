"""Runs a prepared request: turns the token events of the mesh into neutral events, for each of its choices."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from types import TracebackType
from typing import Protocol, Self

import msgspec

from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.core.running import MAX_AT_ONCE, Feed
from exo_mesh.api.core.served_reader import ServedReader
from exo_mesh.base.clock import monotonic
from exo_mesh.base.tasks import Watchdog
from exo_mesh.domain.request import GenerateRequest, Progress, PromptLogprob, PromptLogprobs, RequestEvent, TokenEvent
from exo_mesh.rings.serving.choices import best_choices
from exo_mesh.text.assembler import Piece, TextAssembler
from exo_mesh.text.output.events import OutputEnd, OutputEvent, TextPart
from exo_mesh.text.output.parser import OutputParser


class Generator(Protocol):
    """The source of a request's events: the mesh, or the peer where the request already runs."""

    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        """See RequestService.generate."""


class ChoiceReader:
    """Turns the token events of one choice into neutral events. A choice that can only be text has no parser."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self.position = 0
        """Token events read so far. An event has the same position in every replay of its answer."""
        self.finished = False
        self.logprobs: list[float] = []
        """Log-probabilities of the tokens so far; empty unless the request asks for them."""
        self.prompt_logprobs: list[PromptLogprob] = []
        """Log-probabilities of all prompt tokens but the first; empty unless the request asks for them."""
        self.num_cached_tokens = 0
        self.num_drafts = 0, 0
        """Drafts that became output, and those that did not."""
        """Prompt tokens that came from a prefix cache."""
        self._parser: OutputParser | None = None
        shown: frozenset[str] = frozenset()
        if prepared.needs_parser:
            shown = prepared.output.markers(has_tools=bool(prepared.tools))
            self._parser = OutputParser(
                prepared.output,
                tools=prepared.tools,
                starts_in_reasoning=prepared.starts_in_reasoning,
                max_calls=None if prepared.parallel_calls else 1,
            )
        min_tokens = prepared.choices[0].request.min_tokens
        self._assembler = TextAssembler(prepared.text.detokenizer(shown), prepared.stops, min_tokens)
        self._served = ServedReader(self._assembler, prepared)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, as the engine counted them if it gave text; a piece of text counts as one before
        that."""
        return self._served.output_tokens or self._assembler.num_tokens + self._served.num_pieces

    @property
    def num_prompt_tokens(self) -> int | None:
        """Prompt tokens as a model server counted them; None if none did."""
        return self._served.prompt_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens among the output tokens so far."""
        return (self._parser.num_reasoning_tokens if self._parser else 0) + self._served.num_reasoning_pieces

    def push(self, event: TokenEvent) -> list[OutputEvent]:
        """Take a token event and return the neutral events that it completes; [] if its text is held back."""
        self.position += 1
        if event.cached:
            self.num_cached_tokens = event.cached
        if event.accepted or event.rejected:
            self.num_drafts = event.accepted, event.rejected
        if event.piece is not None or event.respelling is not None or self._served.has_begun or event.usage is not None:
            events = self._served.push(event)
            self.finished = self._served.is_over
            return events
        if event.logprob is not None:
            self.logprobs.append(event.logprob)
        piece = self._assembler.push(event)
        self.finished = piece.finish is not None
        return self._parser.push(piece) if self._parser else _plain(piece)


class AnswerStep(msgspec.Struct):
    """The neutral events from one token event of one choice. Not frozen, because creation is faster and there is one
    for each token."""

    choice: int
    position: int
    events: list[OutputEvent]


class Timings(msgspec.Struct, frozen=True):
    """Seconds for reading the prompt and for writing the answer, without the time in the queue."""

    prompt_s: float
    answer_s: float


class Answer:
    """A prepared request that runs on the mesh. It is a context manager: leaving it early cancels the request
    everywhere.

    Call `wait`, then take the `steps`, until `finished`.
    """

    def __init__(self, requests: Generator, prepared: PreparedRequest, watchdog: Watchdog) -> None:
        self.prepared = prepared
        self.progress: Progress | None = None
        """The last progress report of the mesh; None once a token has arrived after it."""
        self._undecided = set(range(min(len(prepared.choices), MAX_AT_ONCE)))
        self.choices = [ChoiceReader(prepared) for _ in prepared.choices]
        self._num_running = len(self.choices)
        self._items: deque[tuple[int, TokenEvent]] = deque()
        sources = [requests.generate(prepared.model, choice.request) for choice in prepared.choices]
        self._feed: Feed[RequestEvent] = Feed(sources, watchdog)
        self._began = self._first = self._last = monotonic()

    async def __aenter__(self) -> Self:
        await self._feed.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._feed.__aexit__(kind, error, trace)

    @property
    def is_taken(self) -> bool:
        """Whether the mesh has accepted the request: a ring works on it or has queued it, or a ring is being loaded for
        it. Until then the request may still be refused."""
        return not self._undecided

    @property
    def finished(self) -> bool:
        """Whether every choice is complete."""
        return self._num_running == 0

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once, even if it has several answers."""
        counted = [choice.num_prompt_tokens for choice in self.choices[:: self.prepared.num_drawn]]
        known = [number for number in counted if number is not None]
        return sum(known) if known else self.prepared.num_prompt_tokens

    @property
    def num_drafts(self) -> tuple[int, int]:
        """Drafts of all choices that became output, and those that did not."""
        accepted, rejected = zip(*(choice.num_drafts for choice in self.choices), strict=True)
        return sum(accepted), sum(rejected)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all prompts that came from a prefix cache. Each prompt counts once, with its first answer."""
        found = sum(choice.num_cached_tokens for choice in self.choices[:: self.prepared.num_drawn])
        return min(found, self.num_prompt_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices so far."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def timings(self) -> Timings:
        """The times so far, measured at this node."""
        return Timings(self._first - self._began, self._last - self._first)

    async def wait(self, deadline: float = math.inf) -> bool:
        """Wait for token events. Returns False if the deadline passes without one. Raises the MeshError that ended the
        request."""
        while items := await self._feed.take(deadline):
            for index, item in items:
                if isinstance(item, TokenEvent):
                    self._items.append((index, item))
                    self.progress = None
                elif isinstance(item, Progress):
                    self._see(item)
                    if item.phase == "placing":  # the mesh may still refuse the request
                        continue
                elif isinstance(item, PromptLogprobs):
                    self.choices[index].prompt_logprobs += item.entries
                self._undecided.discard(index)
            if self._items:
                self._last = monotonic()
                if not self.num_tokens:
                    self._first = self._last
                return True
        return False

    def steps(self) -> Iterator[AnswerStep]:
        """Yields a step for each waiting token event that completes neutral events. The counts of this object are those
        at the yielded step. A step with OutputEnd is the last of its choice."""
        while self._items:
            index, item = self._items.popleft()
            choice = self.choices[index]
            if choice.finished:  # the ring may send tokens after a stop string
                continue
            events = choice.push(item)
            if choice.finished:
                self._num_running -= 1
            if events:
                yield AnswerStep(index, choice.position, events)

    def prompt_logprobs_of(self, choice: int) -> list[PromptLogprob]:
        """The log-probabilities of a choice's prompt; the first choice of each prompt has them."""
        num_drawn = self.prepared.num_drawn
        return self.choices[choice // num_drawn * num_drawn].prompt_logprobs

    def best(self) -> list[int]:
        """The indices of the choices that the client gets, in their order; the likeliest of each prompt."""
        num_drawn, num_kept = self.prepared.num_drawn, self.prepared.num_kept
        if num_drawn == num_kept:
            return list(range(len(self.choices)))
        kept: list[int] = []
        for start in range(0, len(self.choices), num_drawn):
            group = [choice.logprobs for choice in self.choices[start : start + num_drawn]]
            kept += [start + index for index in best_choices(group, num_kept)]
        return kept

    def call_id(self, choice: int, index: int, prefix: str = "call_") -> str:
        """The id of a tool call; it is the same in every replay of the answer."""
        text = f"{self.prepared.choices[choice].request.request_id}/{index}"
        return prefix + hashlib.sha256(text.encode()).hexdigest()[:24]

    def _see(self, progress: Progress) -> None:
        self.progress = progress
        if progress.phase != "prefill":
            self._began = self._first = monotonic()


def _plain(piece: Piece) -> list[OutputEvent]:
    made: list[OutputEvent] = [TextPart(piece.text, piece.tokens)] if piece.text or piece.tokens else []
    return [*made, OutputEnd(piece.finish.value, piece.stop_string)] if piece.finish is not None else made
