"""A request while it runs: the service's token events in, neutral events out, for each of its choices."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.core.running import MAX_AT_ONCE, Feed
from exo_mesh.clock import monotonic
from exo_mesh.domain.request import GenerateRequest, Progress, PromptLogprob, PromptLogprobs, RequestEvent, TokenEvent
from exo_mesh.serving.choices import best_choices
from exo_mesh.tasks import Watchdog
from exo_mesh.text.assembler import Piece, TextAssembler
from exo_mesh.text.output.events import OutputEnd, OutputEvent, TextPart
from exo_mesh.text.output.parser import OutputParser


class Generator(Protocol):
    """Where the events of a request come from: the mesh, or the peer where it runs already."""

    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        """See MeshService.generate."""


class ChoiceReader:
    """Turns the token events of one choice into neutral events. A choice that can be nothing but text has no parser."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self.position = 0
        """Token events read so far: an event has the same position in every replay of its answer."""
        self.finished = False
        self.logprobs: list[float] = []
        """Of the tokens so far; only where they are asked for."""
        self.prompt_logprobs: list[PromptLogprob] = []
        """Of the prompt's tokens but the first; only where they are asked for."""
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
        self._assembler = TextAssembler(prepared.text.detokenizer(shown), prepared.stops)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._assembler.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them that are thoughts."""
        return self._parser.num_reasoning_tokens if self._parser else 0

    def push(self, event: TokenEvent) -> list[OutputEvent]:
        """What the event makes; [] if its text is held."""
        self.position += 1
        if event.logprob is not None:
            self.logprobs.append(event.logprob)
        piece = self._assembler.push(event)
        self.finished = piece.finish is not None
        return self._parser.push(piece) if self._parser else _plain(piece)


@dataclass(slots=True)
class AnswerStep:
    """What one token event of one choice has made. Not frozen: one is made for each token."""

    choice: int
    position: int
    events: list[OutputEvent]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds for reading the prompt and for writing the answer, once the request had its turn."""

    prompt_s: float
    answer_s: float


class Answer:
    """A prepared request on the mesh. Use as a context: leaving it early cancels the request everywhere.

    Wait, then take the steps, until it is finished.
    """

    def __init__(self, service: Generator, prepared: PreparedRequest, watchdog: Watchdog) -> None:
        self.prepared = prepared
        self.progress: Progress | None = None
        """What is being waited for, as last heard; None once tokens have come after it."""
        self._undecided = set(range(min(len(prepared.choices), MAX_AT_ONCE)))
        self.choices = [ChoiceReader(prepared) for _ in prepared.choices]
        self._num_running = len(self.choices)
        self._items: deque[tuple[int, TokenEvent]] = deque()
        sources = [service.generate(prepared.model, choice.request) for choice in prepared.choices]
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
        """Whether the mesh has taken the request: a ring works on it or has it in its queue, or one is being loaded for
        it. Until then the request may still be refused."""
        return not self._undecided

    @property
    def finished(self) -> bool:
        """Whether every choice has its end."""
        return self._num_running == 0

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them that are thoughts."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def timings(self) -> Timings:
        """As measured here, so far."""
        return Timings(self._first - self._began, self._last - self._first)

    async def wait(self, deadline: float = math.inf) -> bool:
        """Wait for token events; False once the deadline is reached without one. Raises the MeshError that ended the
        request."""
        while items := await self._feed.take(deadline):
            for index, item in items:
                if isinstance(item, TokenEvent):
                    self._items.append((index, item))
                    self.progress = None
                elif isinstance(item, Progress):
                    self._see(item)
                    if item.phase == "placing":
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
        """What the token events that have come make, each with something in it. The counts are those at the step in
        hand. After a step with OutputEnd, its choice has no other."""
        while self._items:
            index, item = self._items.popleft()
            choice = self.choices[index]
            if choice.finished:
                continue
            events = choice.push(item)
            if choice.finished:
                self._num_running -= 1
            if events:
                yield AnswerStep(index, choice.position, events)

    def prompt_logprobs_of(self, choice: int) -> list[PromptLogprob]:
        """Of the prompt of a choice. The first choice of each prompt brings them."""
        num_drawn = self.prepared.num_drawn
        return self.choices[choice // num_drawn * num_drawn].prompt_logprobs

    def best(self) -> list[int]:
        """The choices that the client gets, in their order."""
        num_drawn, num_kept = self.prepared.num_drawn, self.prepared.num_kept
        if num_drawn == num_kept:
            return list(range(len(self.choices)))
        kept: list[int] = []
        for start in range(0, len(self.choices), num_drawn):
            group = [choice.logprobs for choice in self.choices[start : start + num_drawn]]
            kept += [start + index for index in best_choices(group, num_kept)]
        return kept

    def call_id(self, choice: int, index: int) -> str:
        """The id of a tool call: the same in every replay of the answer."""
        text = f"{self.prepared.choices[choice].request.request_id}/{index}"
        return "call_" + hashlib.sha256(text.encode()).hexdigest()[:24]

    def _see(self, progress: Progress) -> None:
        self.progress = progress
        if progress.phase != "prefill":
            self._began = self._first = monotonic()


def _plain(piece: Piece) -> list[OutputEvent]:
    made: list[OutputEvent] = [TextPart(piece.text, piece.tokens)] if piece.text or piece.tokens else []
    return [*made, OutputEnd(piece.finish.value)] if piece.finish is not None else made
