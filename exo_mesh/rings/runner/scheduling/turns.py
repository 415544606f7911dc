"""Estimates how long a request waits in the queue of a ring, from the turns that earlier requests got. Pure."""

from __future__ import annotations

from collections import deque

KEPT = 32
"""Intervals between turns that count: about the last 30 s of a busy ring."""


class TurnClock:
    """Measures the seconds between two turns while requests wait. Times are seconds of any one clock.

    Time in which no request waits does not count: an unused turn does not show how fast the ring is.
    """

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=KEPT)
        self._since: float | None = None

    @property
    def is_counting(self) -> bool:
        """Whether some request waited at the last `note`."""
        return self._since is not None

    def note(self, num_waiting: int, num_turns: int, now: float) -> None:
        """Note that `num_turns` waiting requests got their turns now, and that `num_waiting` still wait."""
        if self._since is not None and num_turns:
            self._intervals += [(now - self._since) / num_turns] * num_turns
            self._since = now
        if not num_waiting:
            self._since = None
        elif self._since is None:
            self._since = now

    def wait_s(self, place: int, now: float) -> float | None:
        """Seconds until the request at this place (1 is next) has its turn; None before the first turn."""
        if not self._intervals:
            return None
        interval_s = sum(self._intervals) / len(self._intervals)
        passed_s = 0.0 if self._since is None else now - self._since
        return (place - 1) * interval_s + max(0.0, interval_s - passed_s)
