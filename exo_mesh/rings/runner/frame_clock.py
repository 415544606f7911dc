"""Measures how long the engine has been computing one frame, and how long such frames usually take: input of a
watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable

ENOUGH = 8
"""Frames of a kind before their times count: the first ones compile kernels and touch cold pages."""

WEIGHT = 0.1
"""Weight of the newest frame in the running mean."""


class FrameClock:
    """Times the frames of one engine.

    `begin` and `end` are called by the thread that computes. Everything else may be read from any thread; the numbers
    may be of slightly different moments. Prefill counts per token, because its frames differ in size; decode counts per
    frame, because a few more rows cost little.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = 0.0
        self._mean_s = {False: 0.0, True: 0.0}
        self._seen = {False: 0, True: 0}
        self.prefill_tokens = 0
        """Tokens of all prefill frames since the start; prefill_s is the time that these frames took."""
        self.prefill_s = 0.0
        self.tokens = 0
        """Tokens of the frame that is being computed; 0 if there is none."""
        self.is_prefill = False

    def begin(self, tokens: int, *, is_prefill: bool) -> None:
        """Note that the engine starts a frame. A frame without tokens (ends of sequences) counts as one token."""
        self._began = self._now()
        self.is_prefill = is_prefill
        self.tokens = max(1, tokens)

    def end(self) -> float:
        """Note that the engine has finished its frame; returns the seconds that it took."""
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
        """Prefill frames computed since the start."""
        return self._seen[True]

    @property
    def decode_frames(self) -> int:
        return self._seen[False]

    def expected_s(self) -> float:
        """Seconds that the current frame should take, judging by earlier ones; 0 if that is not known."""
        kind, tokens = self.is_prefill, self.tokens
        if self._seen[kind] < ENOUGH:
            return 0.0
        return self._mean_s[kind] * (tokens if kind else 1)
