"""How much processor time fetching may take while this machine serves requests.

That is for hashing and writing, whatever the source. Copies from peers also pause for the time that they take on the
network: `CopyPace` in exo_mesh/files/pace.py, which the file server uses as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from exo_mesh.clock import Clock

BUSY_SHARE = 0.25
"""Of one core, for all threads together, while streams run on this machine."""

MOST_REST_S = 2.0


class DutyCycle:
    """Makes threads rest between pieces of work, by the processor time that each has taken since its last rest."""

    def __init__(self, clock: Clock = time.thread_time, sleep: Callable[[float], object] = time.sleep) -> None:
        self.is_busy = False
        self._clock = clock
        self._sleep = sleep
        self._turn = threading.Lock()
        self._mine = threading.local()

    def rest(self) -> None:
        """Sleep as long as the share of this thread asks for; one thread after the other, so that shares add up."""
        now = self._clock()
        spent_s = now - getattr(self._mine, "began", now)
        if self.is_busy and spent_s > 0:
            with self._turn:
                self._sleep(min(spent_s * (1 / BUSY_SHARE - 1), MOST_REST_S))
        self._mine.began = self._clock()
