"""Answers the requests of a whole-model instance: queue, engine, and the updates to the callers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.base.telemetry.durations import WAIT_BOUNDS_S, Durations
from exo_mesh.domain.bounded_json import decode_bounded
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.replay import Kept
from exo_mesh.domain.request import FinishReason, GenerateRequest, Prefilled, Queued, TokenEvent, Tokens
from exo_mesh.domain.whole.repeating import Repeated
from exo_mesh.domain.whole.text_pieces import TextPiece
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.engine.whole import WholeModelEngine
from exo_mesh.errors import EngineError, InputError, MeshError, SupersededError
from exo_mesh.rings.runner.mailbox import CallerUpdate, DriverNews
from exo_mesh.rings.runner.replays import Replays, replayed
from exo_mesh.rings.runner.ring_rest import RingRest
from exo_mesh.rings.runner.whole.slots import Slots, Waiter
from exo_mesh.rings.runner.whole.thought_limit import within_budget

MAX_PIECES_PER_TOKEN = 4
"""An engine that has given more pieces of text than this for each token of the limit does not keep the limit."""

SIGN_OF_LIFE_S = 5.0
"""While an engine is silent, its caller gets a message this often; the engine has deadlines of its own."""


_log = logging.getLogger(__name__)


class AnswerCounts(msgspec.Struct):
    """Counted since the start, for the heartbeat. busy_s: time in which at least one request had a slot."""

    tokens: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    events: int = 0
    busy_s: float = 0.0


class WholeDriver:
    """Runs requests on a loaded whole-model engine. All calls come from one event loop."""

    def __init__(
        self,
        plan: Plan,
        engine: WholeModelEngine,
        max_queued: int,
        on_use: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_use: see RingRest."""
        self.plan = plan
        self.counters = AnswerCounts()
        self.queue_waits = Durations(WAIT_BOUNDS_S)
        self.replays = Replays(now)
        self._engine = engine
        self._now = now
        self.slots = Slots(engine.slots, max_queued, now)
        self.rest = RingRest(self._is_busy, on_use, now)
        """When the last request came."""
        self._on_keys: dict[bytes, asyncio.Event] = {}
        """For each key that is worked on: set when another call takes the answer over."""

    def change(self, plan: Plan) -> None:
        """Continue under another plan: running calls go on, and their updates carry its ballot."""
        self.plan = plan

    async def answer(self, request: GenerateRequest) -> AsyncGenerator[CallerUpdate]:
        """Yield the updates of one request until its end or its error. Closing the generator cancels the request."""
        try:
            async with aclosing(self._answer(request)) as updates:
                async for update in updates:
                    yield update
        except MeshError as exc:
            yield self._update(exc)
        except Exception as exc:  # noqa: BLE001 - a bug in an engine must end its request, not the stream to the peer
            _log.exception("request %s failed", request.request_id)
            yield self._update(EngineError(f"the engine failed ({type(exc).__name__}); see the log"))

    async def _answer(self, request: GenerateRequest) -> AsyncGenerator[CallerUpdate]:
        asked = text_request(request)
        kept = self.replays.open(request)
        if kept is None:
            async with aclosing(self._run(request, asked, None, None)) as updates:
                async for update in updates:
                    yield update
            return
        before = self._on_keys.get(request.key_hash)
        if before is not None:
            before.set()
        taken_over = self._on_keys[request.key_hash] = asyncio.Event()
        try:
            kept.meet_pieces(asked.begun)
            unsent = kept.events(len(asked.begun))
            for tokens in replayed(unsent):
                yield self._update(tokens)
            if kept.finish is None:
                pieces = tuple(event.piece for event in kept.events(0) if event.piece is not None)
                rest = replace(asked, begun=pieces)
                async with aclosing(self._run(request, rest, kept, taken_over)) as updates:
                    async for update in updates:
                        yield update
        finally:
            if self._on_keys.get(request.key_hash) is taken_over:
                del self._on_keys[request.key_hash]
                self.replays.release(kept)

    async def _run(
        self,
        request: GenerateRequest,
        asked: TextRequest,
        kept: Kept | None,
        taken_over: asyncio.Event | None,
    ) -> AsyncGenerator[CallerUpdate]:
        """Wait for a slot, and pass the engine's answer on. taken_over: ends the call with SupersededError once set."""
        self.rest.used()
        turn = self.slots.enter(request.client, request.priority, resumed=request.resumed)
        try:
            async for update in self._wait(turn):
                _raise_if_taken(taken_over)
                yield update
            index, began = len(asked.begun), self._now()
            async with aclosing(within_budget(asked, self._events)) as events:
                async for event in events:
                    _raise_if_taken(taken_over)
                    if event is None:
                        yield self._update(Prefilled(0))
                        continue
                    token = _token_event(index, event)
                    if index - len(asked.begun) > MAX_PIECES_PER_TOKEN * request.max_tokens:
                        raise EngineError(f"the engine does not keep the limit of {request.max_tokens} tokens")
                    index += token.finish is None
                    if kept is not None:
                        kept.add(token)
                    self._count(turn, event, began)
                    yield self._update(Tokens((token,)))
        finally:
            self.slots.leave(turn)

    def _update(self, news: DriverNews) -> CallerUpdate:
        return CallerUpdate(self.plan.ballot, news)

    def _is_busy(self) -> bool:
        return self.slots.num_waiting + self.slots.num_running > 0

    async def _wait(self, turn: Waiter) -> AsyncIterator[CallerUpdate]:
        """Yield the place in the queue whenever it changes, until the request has a slot."""
        said: tuple[int, int] | None = None
        while not turn.has_slot:
            turn.changed.clear()
            place, length, wait_s = self.slots.place(turn)
            if (place, length) != said:
                said = place, length
                yield self._update(Queued(place, length, wait_s or 0.0))
            await turn.changed.wait()  # as long as the request waits, which its caller limits
        self.queue_waits.add(turn.began_at - turn.entered_at)
        if said is not None:
            yield self._update(Queued(0))

    async def _events(self, asked: TextRequest) -> AsyncGenerator[TextEvent | None]:
        """The events that the caller does not have; None while the engine is silent. Raises EngineError if the engine
        cannot go on after what the caller has."""
        repeated: Repeated | None = None
        if asked.begun and not self._engine.continues:
            repeated, asked = Repeated(asked.begun), replace(asked, begun=())
        async with aclosing(self._engine.generate(asked)) as events:
            async for event in _with_signs_of_life(events):
                if repeated is None or event is None:
                    yield event
                elif isinstance(event, TextEnd):
                    if not repeated.is_over:
                        raise repeated.differs()
                    yield event
                elif (rest := repeated.take(event)) is not None:
                    yield rest
                if isinstance(event, TextEnd):
                    return
        raise EngineError("the engine ended the answer without saying why")

    def _count(self, turn: Waiter, event: TextEvent, began: float) -> None:
        counters = self.counters
        counters.events += 1
        if isinstance(event, TextPiece):
            counters.tokens += 1
            self.slots.charge(turn, 1)
            return
        counters.prompts += 1
        counters.prompt_tokens += event.usage.prompt_tokens or 0
        counters.busy_s += self._now() - began


def text_request(request: GenerateRequest) -> TextRequest:
    """The request for an engine. Raises InputError if it is not one as text."""
    if request.text is None:
        raise InputError("this instance takes requests as text, and this request has none")
    try:
        body: Any = decode_bounded(request.text.body)
    except (ValueError, RecursionError) as exc:  # ValueError is the base of msgspec.DecodeError
        raise InputError(f"the text of the request is not valid JSON: {exc}") from exc
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise InputError("the text of a request must be a JSON object with either messages or a prompt")
    text = request.text
    limits = request.max_tokens, request.sampling, text.stops
    return TextRequest(request.request_id, body, *limits, text.begun, text.thinking_budget)


async def _with_signs_of_life(events: AsyncGenerator[TextEvent, None]) -> AsyncIterator[TextEvent | None]:
    """The events, and None whenever there was none for SIGN_OF_LIFE_S."""
    following: asyncio.Future[TextEvent] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(events))
            await asyncio.wait((following,), timeout=SIGN_OF_LIFE_S)
            if not following.done():
                yield None
                continue
            done, following = following, None
            try:
                yield done.result()
            except StopAsyncIteration:
                return
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait((following,))


def _token_event(index: int, event: TextEvent) -> TokenEvent:
    if isinstance(event, TextPiece):
        return TokenEvent(index, None, piece=event)
    return TokenEvent(index, None, finish=FinishReason(event.reason), usage=event.usage)


def _raise_if_taken(taken_over: asyncio.Event | None) -> None:
    if taken_over is not None and taken_over.is_set():
        raise SupersededError("the same request was sent again; the newer call continues it")
