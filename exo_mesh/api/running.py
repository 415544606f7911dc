"""One request while it runs: the service's events in, pieces of text out, with bounded memory between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Generic, Self, TypeVar

from exo_mesh.api.convert import Prepared
from exo_mesh.domain.request import Progress, TokenEvent
from exo_mesh.errors import EngineError
from exo_mesh.node.service import MeshService
from exo_mesh.text.assembler import Piece, TextAssembler

T = TypeVar("T")

MAX_BUFFERED = 32  # events waiting for a slow reader; then the generator itself waits


class Feed(Generic[T]):
    """Drives an async generator from one task, from start to close, so that its timeouts and scopes stay in one task.

    Leaving the context cancels the task, closes the generator and waits for both.
    """

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._room = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._pump(), name="request feed")
        self._task.add_done_callback(lambda _: self._ready.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # an error nobody waits for any more

    async def next(self, deadline: float | None) -> T | None:
        """The next item; None once `deadline` (of the loop's clock) is reached. Raises what the generator raised."""
        while not self._items:
            if self._task.done():
                self._task.result()
                raise EngineError("the request ended without saying why")
            self._ready.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._ready.wait()
            except TimeoutError:
                return None
        self._room.set()
        return self._items.popleft()

    async def _pump(self) -> None:
        async with aclosing(self._source) as items:
            async for item in items:
                self._items.append(item)
                self._ready.set()
                while len(self._items) >= MAX_BUFFERED:
                    self._room.clear()
                    await self._room.wait()


class Run:
    """A prepared request on the mesh. Use as a context: leaving it early cancels the request everywhere."""

    def __init__(self, service: MeshService, prepared: Prepared) -> None:
        self.prepared = prepared
        self.progress: Progress | None = None
        """What is being waited for, as last heard."""
        self.position = 0
        """Events that have gone into pieces so far: a piece has the same position in every replay of its answer."""
        self._assembler = TextAssembler(prepared.text.detokenizer(), prepared.stops)
        self._feed: Feed[TokenEvent | Progress] = Feed(service.generate(prepared.model, prepared.request))

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

    async def next(self, deadline: float | None = None) -> Piece | None:
        """The next piece with something in it, or None at the deadline. After one with `finish` there is no other.

        Raises the MeshError that ended the request.
        """
        while (item := await self._feed.next(deadline)) is not None:
            if isinstance(item, Progress):
                self.progress = item
                continue
            self.position += 1
            piece = self._assembler.push(item)
            if piece.text or piece.tokens or piece.finish:
                return piece
        return None
