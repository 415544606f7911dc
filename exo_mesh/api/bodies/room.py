"""Memory for the bodies of requests: a bounded number of bytes, which requests take in turn and give back.

A body is held from its first bytes until its prompt is ready. Small bodies take no room.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from exo_mesh.base.tasks import Turns
from exo_mesh.errors import BodiesWaitError

T = TypeVar("T")

FREE_BYTES = 1 << 16
"""A body up to this weight takes no room. 1,000 of them are as much as an idle node."""

LARGE_BYTES = 1 << 20
"""A body above this weight is large: only one is worked on at a time."""

VALUE_BYTES = 100
"""Weight of a value: its average size once it is decoded."""

WAIT_S = 30.0
"""How long a request waits for room."""

RETRY_S = 5.0

MOST_WAITING, MOST_WAITING_OF_ONE = 32, 16
"""Most requests that wait for one room, and of one client. Each has up to 64 KiB of its body in buffers."""

HOLD_LIMIT_S = 60.0
"""After this long a request gives its room back although its prompt is not ready: it waits for something else then,
such as the files of its model."""


class _Waiter(msgspec.Struct, eq=False):
    amount: int
    client: str
    turn: asyncio.Future[None]


class Room:
    """Gives out `size` bytes, at most `of_one` of them to one client. what: the end of the refusal's sentence.

    Room goes first to those who hold the least, then to those who were not the last, then in the order of requests. A
    request for more than `of_one` is given when its client holds nothing.
    """

    def __init__(self, size: int, of_one: int, what: str, wait_s: float = WAIT_S) -> None:
        self._size, self._of_one, self._what, self._wait_s = size, of_one, what, wait_s
        self._taken: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []
        self._last = ""

    async def take(self, amount: int, client: str) -> None:
        """Take bytes, or wait for them. Raises BodiesWaitError if too many wait already, or after `wait_s`."""
        waiter = _Waiter(min(amount, self._size), client, asyncio.get_running_loop().create_future())
        if not self._waiting and self._fits(waiter):
            self._give(waiter)
            return
        if len(self._waiting) >= MOST_WAITING or self._num_waiting(client) >= MOST_WAITING_OF_ONE:
            raise self._refusal("too many requests wait for it already")
        self._waiting.append(waiter)
        self._wake()
        try:
            async with asyncio.timeout(self._wait_s):
                await waiter.turn
        except BaseException as exc:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self.give_back(waiter.amount, client)
            if isinstance(exc, TimeoutError):
                raise self._refusal(f"it was busy for {self._wait_s:g} s") from exc
            raise

    def give_back(self, amount: int, client: str) -> None:
        """Give bytes back that this client took."""
        self._taken[client] -= min(amount, self._size)
        if self._taken[client] <= 0:
            del self._taken[client]
        self._wake()

    def _fits(self, waiter: _Waiter) -> bool:
        own = self._taken.get(waiter.client, 0)
        is_within = own == 0 or own + waiter.amount <= self._of_one
        return is_within and self._taken.total() + waiter.amount <= self._size

    def _give(self, waiter: _Waiter) -> None:
        self._taken[waiter.client] += waiter.amount
        self._last = waiter.client

    def _wake(self) -> None:
        while ready := [waiter for waiter in self._waiting if self._fits(waiter)]:
            first = min(ready, key=lambda one: (self._taken.get(one.client, 0), one.client == self._last))
            self._waiting.remove(first)
            self._give(first)
            first.turn.set_result(None)

    def _num_waiting(self, client: str) -> int:
        return sum(waiter.client == client for waiter in self._waiting)

    def _refusal(self, why: str) -> BodiesWaitError:
        return BodiesWaitError(f"this node has no room for {self._what}: {why}; try again", retry_after_s=RETRY_S)


class BodyRooms:
    """The rooms of one API, and the thread in which large bodies are decoded. Close it at the end.

    The largest body and one of half its size have room at a time. reading, discarding: give each chunk of a body that
    takes room, or that is discarded, its turn, one in each round of the event loop; a chunk has at most 64 KiB.
    """

    def __init__(self, max_body_bytes: int, wait_s: float = WAIT_S) -> None:
        self.arriving = Room(max_body_bytes * 3 // 2, max_body_bytes, "the body of this request", wait_s)
        self.middling = Room(16 * LARGE_BYTES, 8 * LARGE_BYTES, "this request", wait_s)
        self.large = Room(1, 1, "another large request, one at a time", wait_s)
        self.reading, self.discarding = Turns(1), Turns(1)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="exo-mesh-body")

    async def work(self, job: Callable[[], T]) -> T:
        """Run work on a large body in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, job)

    def close(self) -> None:
        """Release the thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)


class BodyHold:
    """The room that one request holds. client: who sends it."""

    def __init__(self, rooms: BodyRooms, client: str) -> None:
        self.rooms = rooms
        self.is_large = False
        self._client = client
        self._held: list[tuple[Room, int]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def arriving(self, num_bytes: int) -> None:
        """Take room for a body that arrives."""
        await self._take(self.rooms.arriving, num_bytes)

    async def working(self, num_bytes: int, num_values: int) -> None:
        """Take room for work on a body that has arrived."""
        weight = num_bytes + VALUE_BYTES * num_values
        if weight <= FREE_BYTES:
            return
        self.is_large = weight > LARGE_BYTES
        await self._take(self.rooms.large if self.is_large else self.rooms.middling, 1 if self.is_large else weight)
        self._timer = asyncio.get_running_loop().call_later(HOLD_LIMIT_S, self.release)

    def release(self) -> None:
        """Give all room back."""
        if self._timer is not None:
            self._timer.cancel()
        held, self._held = self._held, []
        for room, amount in held:
            room.give_back(amount, self._client)

    async def _take(self, room: Room, amount: int) -> None:
        await room.take(amount, self._client)
        self._held.append((room, amount))
