"""Runs the sources of one answer and collects their items, with bounded memory for a slow reader."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Generic, Self, TypeVar

from exo_mesh.base.tasks import Watchdog
from exo_mesh.errors import EngineError

T = TypeVar("T")

MAX_BUFFERED = 32  # items of each source that may wait for a slow reader; after that the source waits
MAX_AT_ONCE = 16  # sources that run at the same time, so that one request does not fill the queue of a ring


class Feed(Generic[T]):
    """Runs async generators and collects their items. Each generator runs in one task from start to close, because its
    timeouts and scopes must stay in one task.

    Leaving the context cancels the tasks, closes the generators and waits for both. Waits have no timers; the watchdog
    ends them.
    """

    def __init__(self, sources: Sequence[AsyncGenerator[T, None]], watchdog: Watchdog) -> None:
        self._sources = sources
        self._watchdog = watchdog
        self._items: deque[tuple[int, T]] = deque()
        self._most_items = MAX_BUFFERED * min(len(sources), MAX_AT_ONCE)
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._deadline = math.inf

    async def __aenter__(self) -> Self:
        pumps = [self._pump(index, source) for index, source in enumerate(self._sources)]
        self._tasks = [asyncio.create_task(pump, name="request feed") for pump in pumps]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._ready.set())
        self._watchdog.watch(self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.forget(self._check)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.exception()  # marks an error as seen, because nobody waits for it any more

    async def take(self, deadline: float = math.inf) -> list[tuple[int, T]]:
        """Wait for items and return all that have arrived, each with the index of its source. Returns [] if `deadline`
        (monotonic clock, accurate to the watchdog's period) passes first. Raises an error that a source raised."""
        self._deadline = deadline
        while not self._items:
            self._raise_ends()
            if self._deadline == -math.inf:
                return []
            self._ready.clear()
            await self._ready.wait()
        self._room.set()
        items = list(self._items)
        self._items.clear()
        return items

    def _raise_ends(self) -> None:
        ended = [task for task in self._tasks if task.done()]
        for task in ended:
            task.result()
        if len(ended) == len(self._tasks):
            raise EngineError("the request ended without a result")

    def _check(self, now: float) -> float:
        if now < self._deadline:
            return self._deadline
        self._deadline = -math.inf
        self._ready.set()
        return math.inf

    async def _pump(self, index: int, source: AsyncGenerator[T, None]) -> None:
        async with self._turns, aclosing(source) as items:
            async for item in items:
                self._items.append((index, item))
                self._ready.set()
                while len(self._items) >= self._most_items:
                    self._room.clear()
                    await self._room.wait()
