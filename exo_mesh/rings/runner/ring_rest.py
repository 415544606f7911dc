"""Decides whether the ring of a runner is idle, so that its hop may rest."""

from __future__ import annotations

import time
from collections.abc import Callable

IDLE_AFTER_S = 30.0
"""Time without a request after which a ring counts as idle. Requests of a conversation often follow each other sooner,
and the next one should find everything as the last one left it."""


class RingRest:
    """Knows when the last request used the ring, as far as this runner sees. From any thread.

    is_busy: whether a request waits or runs here. on_use: called when a request uses a ring that was idle, before its
    first frame is computed or sent; in the thread that calls `used`.
    """

    def __init__(
        self,
        is_busy: Callable[[], bool],
        on_use: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._is_busy = is_busy
        self._on_use = on_use
        self._now = now
        self._used_at = now()

    def used(self) -> None:
        """Note a request, or a frame that has rows of one."""
        before, self._used_at = self._used_at, self._now()
        if self._used_at - before >= IDLE_AFTER_S:
            self._on_use()

    @property
    def is_idle(self) -> bool:
        """Whether no request has used the ring for IDLE_AFTER_S, and none waits or runs."""
        if self._now() - self._used_at < IDLE_AFTER_S:
            return False
        if self._is_busy():
            self._used_at = self._now()
            return False
        return True
