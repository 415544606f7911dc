"""Decides when the only sequence on a ring must end, because a machine stays critically short of memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LONE_FRAMES, LONE_S = 16, 3.0
"""A sequence that is alone on the ring while a machine is critically short of memory ends after LONE_FRAMES frames and
LONE_S seconds: two readings of that machine's memory must have confirmed it."""


@dataclass(slots=True)
class LoneTime:
    """How long one sequence has been alone while memory was critically short."""

    _frames: int = 0
    _since: float = 0.0

    def is_over(self, *, is_lone: bool, now: float) -> bool:
        """Note a frame that came round; returns whether the sequence must end. After that the count begins again. now:
        seconds of any one clock."""
        if not is_lone:
            self._frames = 0
            return False
        if not self._frames:
            self._since = now
        self._frames += 1
        if self._frames < LONE_FRAMES or now - self._since < LONE_S:
            return False
        self._frames = 0
        return True
