"""Computes from the last heartbeats of a stage how it spends its time."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from exo_mesh.wire.proto.runner_pb2 import Heartbeat

WINDOW_BEATS = 21
"""Heartbeats that are kept: the last 10 s."""


@dataclass(slots=True)
class StageShares:
    """The shares of a stage's time over its last heartbeats."""

    _beats: deque[tuple[float, float, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW_BEATS))
    _prefill: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_BEATS))

    def take(self, now: float, beat: Heartbeat) -> None:
        """Takes a heartbeat. now: monotonic seconds."""
        self._beats.append((now, beat.busy_s, beat.sequences > 0))
        self._prefill.append((beat.prefill_tokens, beat.prefill_s))

    @property
    def busy(self) -> float:
        """The share of time in which the stage computed."""
        return _share(list(self._beats), only_at_work=False)

    @property
    def bubble(self) -> float:
        """The share of the time with sequences in which the stage waited for frames; 0 if it had no sequences."""
        beats = list(self._beats)
        worked = any(before[2] and after[2] for before, after in itertools.pairwise(beats))
        return 1 - _share(beats, only_at_work=True) if worked else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of the time spent on them; 0 if there were none."""
        (tokens, seconds), (now_tokens, now_seconds) = self._prefill[0], self._prefill[-1]
        return (now_tokens - tokens) / (now_seconds - seconds) if now_seconds > seconds else 0.0


def _share(beats: list[tuple[float, float, bool]], *, only_at_work: bool) -> float:
    elapsed_s = busy_s = 0.0
    for before, after in itertools.pairwise(beats):
        if not only_at_work or (before[2] and after[2]):
            elapsed_s += after[0] - before[0]
            busy_s += after[1] - before[1]
    return min(1.0, max(0.0, busy_s / elapsed_s)) if elapsed_s > 0 else 0.0
