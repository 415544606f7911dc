"""Limits the processor time of fetching while this machine serves requests.

The limit is for hashing and writing, whatever the source. Copies from peers also pause for the time that they use the
network: see `CopyPace` in exo_mesh/models/file_server/pace.py, which the file server uses as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from exo_mesh.base.clock import Clock

BUSY_SHARE = 0.25
"""Share of one core, for all threads together, while streams run on this machine."""

MOST_REST_S = 2.0


class DutyCycle:
    """Makes threads pause between pieces of work, by the processor time that each has used since its last pause."""

    def __init__(self, clock: Clock = time.thread_time, sleep: Callable[[float], object] = time.sleep) -> None:
        self.is_busy = False
        self._clock = clock
        self._sleep = sleep
        self._turn = threading.Lock()
        self._mine = threading.local()

    def rest(self) -> None:
        """Sleeps as long as this thread's share requires; one thread after the other, so that the shares add up."""
        now = self._clock()
        spent_s = now - getattr(self._mine, "began", now)
        if self.is_busy and spent_s > 0:
            with self._turn:
                self._sleep(min(spent_s * (1 / BUSY_SHARE - 1), MOST_REST_S))
        self._mine.began = self._clock()
