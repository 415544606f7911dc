"""One request while it runs: the service's events in, pieces of text out, with bounded memory between."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import Generic, Self, TypeVar

from exo_mesh.api.openai.convert import PreparedRequest
from exo_mesh.domain.request import Progress, PromptLogprob, PromptLogprobs, RequestEvent, TokenEvent
from exo_mesh.errors import EngineError
from exo_mesh.node.service import MeshService
from exo_mesh.tasks import Watchdog
from exo_mesh.text.assembler import Piece, TextAssembler

T = TypeVar("T")

MAX_BUFFERED = 32  # events waiting for a slow reader; then the generator itself waits


class Feed(Generic[T]):
    """Drives an async generator from one task, from start to close, so that its timeouts and scopes stay in one task.

    Leaving the context cancels the task, closes the generator and waits for both. Waits have no timer of their own: the
    watchdog ends them.
    """

    def __init__(self, source: AsyncGenerator[T, None], watchdog: Watchdog) -> None:
        self._source = source
        self._watchdog = watchdog
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._deadline = math.inf

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._pump(), name="request feed")
        self._task.add_done_callback(lambda _: self._ready.set())
        self._watchdog.watch(self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.forget(self._check)
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # an error nobody waits for any more

    async def take(self, deadline: float = math.inf) -> list[T]:
        """All items that have come, at least one; none once `deadline` (of the monotonic clock, kept to within the
        watchdog's period) is reached. Raises what the generator raised."""
        self._deadline = deadline
        while not self._items:
            if self._task.done():
                self._task.result()
                raise EngineError("the request ended without saying why")
            if self._deadline == -math.inf:
                return []
            self._ready.clear()
            await self._ready.wait()
        self._room.set()
        items = list(self._items)
        self._items.clear()
        return items

    def _check(self, now: float) -> float:
        if now < self._deadline:
            return self._deadline
        self._deadline = -math.inf
        self._ready.set()
        return math.inf

    async def _pump(self) -> None:
        async with aclosing(self._source) as items:
            async for item in items:
                self._items.append(item)
                self._ready.set()
                while len(self._items) >= MAX_BUFFERED:
                    self._room.clear()
                    await self._room.wait()


class Run:
    """A prepared request on the mesh. Use as a context: leaving it early cancels the request everywhere.

    Wait, then take the pieces, until one has `finish`.
    """

    def __init__(self, service: MeshService, prepared: PreparedRequest, watchdog: Watchdog) -> None:
        self.prepared = prepared
        self.progress: Progress | None = None
        """What is being waited for, as last heard."""
        self.prompt_logprobs: list[PromptLogprob] = []
        """Of the prompt from its second token on, if they are wanted: whole once the first token event has come."""
        self.position = 0
        """Events that have gone into pieces so far: a piece has the same position in every replay of its answer."""
        self.finished = False
        self._assembler = TextAssembler(prepared.text.detokenizer(), prepared.stops)
        self._events: deque[TokenEvent] = deque()
        self._feed: Feed[RequestEvent] = Feed(service.generate(prepared.model, prepared.request), watchdog)

    async def __aenter__(self) -> Self:
        await self._feed.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._feed.__aexit__(kind, error, trace)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._assembler.num_tokens

    async def wait(self, deadline: float = math.inf) -> bool:
        """Wait for token events; False once the deadline is reached without one. Raises the MeshError that ended the
        request."""
        while items := await self._feed.take(deadline):
            for item in items:
                if isinstance(item, Progress):
                    self.progress = item
                elif isinstance(item, PromptLogprobs):
                    self.prompt_logprobs += item.entries
                else:
                    self._events.append(item)
            if self._events:
                return True
        return False

    def pieces(self) -> Iterator[Piece]:
        """What the events that have come make, each piece with something in it. `num_tokens` and `position` are those
        of the piece in hand; after one with `finish` there is no other."""
        while self._events and not self.finished:
            self.position += 1
            piece = self._assembler.push(self._events.popleft())
            self.finished = piece.finish is not None
            if piece.text or piece.tokens or piece.finish:
                yield piece
