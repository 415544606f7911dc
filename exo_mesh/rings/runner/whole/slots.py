"""The places of a whole-model instance: a bounded number of requests at once, the others in a fair queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import msgspec

from exo_mesh.base.printable import counted
from exo_mesh.errors import OverloadError
from exo_mesh.rings.runner.scheduling.queue import OUTPUT_WEIGHT, FairQueue

SMOOTHING = 0.2
"""Weight of the newest answer in the mean time of an answer."""


class Waiter(msgspec.Struct, eq=False):
    """One request that waits for a slot or has one. `changed` is set whenever its place in the queue may change."""

    id: int
    client: str
    priority: int
    resumed: bool
    has_slot: bool = False
    began_at: float = 0.0
    entered_at: float = 0.0
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class Slots:
    """Gives out the slots, in the order of FairQueue. All calls come from one event loop."""

    def __init__(self, num_slots: int, max_waiting: int, now: Callable[[], float]) -> None:
        self.num_slots = max(1, num_slots)
        self._queue: FairQueue[Waiter] = FairQueue(max_waiting)
        self._now = now
        self._ids = count(1)
        self._running = 0
        self._answer_s = 0.0

    @property
    def num_running(self) -> int:
        return self._running

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def oldest_wait_s(self) -> float:
        """How long the oldest waiting request has waited; 0.0 without one."""
        return max((self._now() - turn.entered_at for turn in self._queue), default=0.0)

    def enter(self, client: str, priority: int, *, resumed: bool) -> Waiter:
        """Queue a request; it may have a slot at once. Raises OverloadError if the queue is full."""
        turn = Waiter(next(self._ids), client, priority, resumed, entered_at=self._now())
        if not self._queue.push(turn):
            wait_s = self._wait_s(len(self._queue))
            raise OverloadError(
                f"already waiting for the {counted(self.num_slots, 'place')} of this model: {len(self._queue)}",
                retry_after_s=max(1.0, wait_s),
            )
        self._admit()
        return turn

    def place(self, turn: Waiter) -> tuple[int, int, float]:
        """(place, length of the queue, estimated wait in seconds) of a waiting request; place 1 is next."""
        ahead = sum(_goes_before(other, turn) for other in self._queue)
        return ahead + 1, len(self._queue), self._wait_s(ahead)

    def charge(self, turn: Waiter, tokens: int) -> None:
        """Count output tokens as used by the client of a request."""
        self._queue.charge(turn.client, OUTPUT_WEIGHT * tokens)

    def leave(self, turn: Waiter) -> None:
        """End a request, whether it has a slot or waits."""
        if turn.has_slot:
            turn.has_slot = False
            self._running -= 1
            self._queue.left(turn.client)
            took_s = self._now() - turn.began_at
            self._answer_s = took_s if not self._answer_s else self._answer_s + SMOOTHING * (took_s - self._answer_s)
        else:
            self._queue.remove(turn.id)
        self._admit()

    def _admit(self) -> None:
        while self._running < self.num_slots and (turn := self._queue.first()) is not None:
            self._queue.pop()
            self._running += 1
            turn.has_slot, turn.began_at = True, self._now()
            turn.changed.set()
        for waiting in self._queue:
            waiting.changed.set()

    def _wait_s(self, ahead: int) -> float:
        """The estimated wait of a request with this many others before it: in turns of all slots."""
        return self._answer_s * (ahead + 1) / self.num_slots


def _goes_before(other: Waiter, turn: Waiter) -> bool:
    """Whether another waiting request has its turn first, if both clients have used the model equally."""
    if other is turn:
        return False
    return (not other.resumed, -other.priority, other.id) < (not turn.resumed, -turn.priority, turn.id)
