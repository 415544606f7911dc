"""How long the engine has been at one frame, and how long frames like it take: what a watchdog needs to know."""

from __future__ import annotations

import time
from collections.abc import Callable

ENOUGH = 8
"""Frames of a kind before what they took says anything: the first ones compile kernels and touch cold pages."""

WEIGHT = 0.1
"""Of the newest frame in the running mean."""


class FrameClock:
    """`begin` and `end` by the thread that computes; the rest from any thread: numbers of one moment or the next.

    Prefill counts per token, since its frames differ in size; decode per frame, since a few rows more cost little.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = 0.0
        self._mean_s = {False: 0.0, True: 0.0}
        self._seen = {False: 0, True: 0}
        self.prefill_tokens = 0
        """Of all prefill frames since the start; prefill_s is the time that they took."""
        self.prefill_s = 0.0
        self.tokens = 0
        """Of the frame that is being computed; 0 if none is."""
        self.is_prefill = False

    def begin(self, tokens: int, *, is_prefill: bool) -> None:
        """The engine gets a frame. One without tokens (ends of sequences) counts as one."""
        self._began = self._now()
        self.is_prefill = is_prefill
        self.tokens = max(1, tokens)

    def end(self) -> float:
        """The engine has come back; answers the seconds that it took."""
        took_s = self._now() - self._began
        kind = self.is_prefill
        each_s = took_s / self.tokens if kind else took_s
        if kind:
            self.prefill_tokens += self.tokens
            self.prefill_s += took_s
        self._seen[kind] += 1
        if self._seen[kind] == 1:
            self._mean_s[kind] = each_s
        else:
            self._mean_s[kind] += WEIGHT * (each_s - self._mean_s[kind])
        self.tokens = 0
        return took_s

    @property
    def prefill_frames(self) -> int:
        """Computed since the start."""
        return self._seen[True]

    @property
    def decode_frames(self) -> int:
        return self._seen[False]

    def expected_s(self) -> float:
        """How long the frame that is being computed should take, by those before it; 0 if that is not known."""
        kind, tokens = self.is_prefill, self.tokens
        if self._seen[kind] < ENOUGH:
            return 0.0
        return self._mean_s[kind] * (tokens if kind else 1)
