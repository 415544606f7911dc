"""Messages to requests in the queue of a driver: their places, and how long they will wait."""

from __future__ import annotations

import time
from collections.abc import Mapping

from exo_mesh.base.telemetry.durations import WAIT_BOUNDS_S, Durations
from exo_mesh.domain.request import Queued
from exo_mesh.errors import MemoryPressureError, OverloadError
from exo_mesh.rings.runner.callers import Callers
from exo_mesh.rings.runner.generation import Generation
from exo_mesh.rings.runner.scheduling.queue import TurnClock
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler

SIGN_OF_LIFE_S = 1.0
"""Seconds between two messages to a waiting request about its place in the queue, as long as frames come round. The
entry peer gives up after 30 s of silence."""


class QueuePlaces:
    """Tells waiting requests their places, and measures how long requests wait. The queue itself is the scheduler's.

    live: all requests of the driver, by sequence; only read.
    """

    def __init__(self, scheduler: Scheduler, live: Mapping[int, Generation], callers: Callers) -> None:
        self._scheduler = scheduler
        self._live = live
        self._callers = callers
        self._turns = TurnClock()
        self._signed_at = 0.0
        self._num_turns = 0
        """Requests that were told their places and got their turns since the last `note_turns`."""
        self.waits = Durations(WAIT_BOUNDS_S)

    @property
    def is_counting(self) -> bool:
        """Whether `note_turns` has something to note although no request waits."""
        return self._num_turns > 0 or self._turns.is_counting

    def tell_places(self, only: Generation | None = None) -> None:
        """Report their places in the queue to all waiting requests, or to one: silence would mean that the ring does
        not move."""
        now, length = time.perf_counter(), self._scheduler.num_waiting
        for place, sequence in self._scheduler.places():
            generation = self._live[sequence.id]
            if only is None or only is generation:
                generation.queued = True
                self._callers.tell(generation, Queued(place, length, self._turns.wait_s(place, now) or 0.0))

    def reassure(self, now: float) -> None:
        """Report all places again if the last time was SIGN_OF_LIFE_S ago. For each frame that came round."""
        if now - self._signed_at > SIGN_OF_LIFE_S:
            self._signed_at = now
            self.tell_places()

    def note_wait(self, generation: Generation, now: float) -> None:
        """Note that a request begins to run: how long it waited, unless it has been running before."""
        if not generation.index:
            self.waits.add(now - generation.submitted_at)

    def leave(self, generation: Generation) -> None:
        """Report to a request that was told its place that it no longer waits."""
        if generation.queued:
            generation.queued = False
            self._num_turns += 1
            self._callers.tell(generation, Queued(0))

    def note_turns(self, now: float) -> None:
        """Note how many requests have got their turns since the last call."""
        num_turns, self._num_turns = self._num_turns, 0
        self._turns.note(self._scheduler.num_waiting, num_turns, now)

    def oldest_wait_s(self) -> float:
        """How long the request that came first has waited; 0 if none waits. From any thread."""
        waiting = [self._live.get(sequence.id) for sequence in list(self._scheduler.waiting)]
        since = min((generation.submitted_at for generation in waiting if generation is not None), default=None)
        return 0.0 if since is None else max(0.0, time.perf_counter() - since)

    def overload(self) -> OverloadError:
        """Make the error for one more request. Half of the queue will have moved on when the client tries again."""
        place = max(1, self._scheduler.num_waiting // 2)
        wait_s = self._turns.wait_s(place, time.perf_counter())
        kind = MemoryPressureError if self._scheduler.is_short_of_memory else OverloadError
        return kind(self._scheduler.why_refused, retry_after_s=max(1.0, wait_s or 0.0))
