"""Limits the part of the time in which a node opens tokenizers.

The library holds the interpreter while it reads a tokenizer, so the node does nothing else meanwhile. A process reads a
large one, and encodes no text of another one meanwhile. A node keeps only a few tokenizers, so a client that asks for
more models in turn could keep it busy for most of the time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.errors import OverloadError

T = TypeVar("T")

SHARE = 0.25
"""The part of the time that opening may take in the long run."""

BURST_S = 5.0
"""Time that may be used at once: some five of the largest tokenizers, or a hundred small ones."""

WAIT_LIMIT_S = 20.0
"""How long a request waits for its turn. A longer wait is refused with the time after which to try again."""

MAX_WAITING = 32
"""Most models that wait for their turn."""


class OpeningPace:
    """One model is opened at a time, and the next one waits while the budget is spent."""

    def __init__(self, clock: Clock = monotonic, cpu: Clock = time.thread_time) -> None:
        """cpu: CPU time of the calling thread."""
        self._clock = clock
        self._cpu = cpu
        self._paid_until = 0.0  # when all CPU time so far is paid for at SHARE
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._lock = threading.Lock()  # `timed` runs in threads

    def wait_s(self) -> float:
        """How long the next model has to wait."""
        return max(0.0, self._paid_until - self._clock() - BURST_S / SHARE)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until a model may be opened, and keep others waiting meanwhile. Raises OverloadError."""
        if self._num_waiting >= MAX_WAITING or self.wait_s() > WAIT_LIMIT_S:
            raise self._refusal()
        self._num_waiting += 1
        try:
            async with asyncio.timeout(WAIT_LIMIT_S):
                await self._turn.acquire()
        except TimeoutError as exc:
            raise self._refusal() from exc
        finally:
            self._num_waiting -= 1
        try:
            if (wait_s := self.wait_s()) > WAIT_LIMIT_S:
                raise self._refusal()
            await asyncio.sleep(wait_s)
            yield
        finally:
            self._turn.release()

    def timed(self, job: Callable[[], T]) -> T:
        """Run a job and take its CPU time from the budget, also if it fails."""
        began = self._cpu()
        try:
            return job()
        finally:
            self.note(self._cpu() - began)

    def note(self, used_s: float) -> None:
        """Take time from the budget."""
        with self._lock:
            self._paid_until = max(self._paid_until, self._clock()) + used_s / SHARE

    def _refusal(self) -> OverloadError:
        wait_s = max(1.0, self.wait_s())
        return OverloadError(
            f"this node has opened too many models in a short time; try again in {wait_s:.0f} s, or use a model that "
            "is open",
            retry_after_s=wait_s,
        )
