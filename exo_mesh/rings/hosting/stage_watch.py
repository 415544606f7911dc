"""Decides when a runner is stuck, from its progress reports and how long it has been silent. Pure: no clock."""

from __future__ import annotations

from enum import StrEnum

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.reports import FromRunner, RunnerReady
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.stage import StageLoading

BEAT_MOST_S = 1.0
"""Most seconds that one heartbeat can add to a standstill: after a pause of this node or of the whole machine, the time
that has passed is no measure of the runner."""


class Phase(StrEnum):
    """The progress of a runner towards readiness."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"


class StageWatch:
    """Watches the progress of one runner: of a load, the part done and the runner's own counter; of a frame, that it
    ends."""

    def __init__(self, limits: RunnerLimits, stage_bytes: int) -> None:
        self._limits = limits
        self._stage_bytes = stage_bytes
        self.phase = Phase.STARTING
        self.silent_s = 0.0
        self._still_s = 0.0
        self._longest_step_s = 0.0
        self._steps = 0
        self._progress = 0
        self._loaded = 0
        self._beat = Heartbeat()

    @property
    def stuck_s(self) -> float:
        """Seconds without progress although it has work, or without a report."""
        return max(self._still_s, self.silent_s)

    def silent(self, seconds: float) -> str:
        """Note that no report came for this many more seconds; returns why that is too long, or ""."""
        self.silent_s += seconds
        most_s = self._limits.first_message_s if self.phase is Phase.STARTING else self._limits.silence_s
        return f"has been silent for {most_s:.0f} s" if self.silent_s >= most_s else ""

    def heard(self, report: FromRunner, gap_s: float) -> str:
        """Note a report, gap_s after the last one; returns why the runner counts as stuck, or ""."""
        self.silent_s = 0.0
        if isinstance(report, RunnerReady):
            self.phase, self._still_s = Phase.READY, 0.0
        elif self.phase is Phase.STARTING:
            self.phase = Phase.LOADING
        if isinstance(report, StageLoading):
            self._load_moved(report.done)
        elif isinstance(report, Heartbeat):
            return self._beat_came(report, min(gap_s, BEAT_MOST_S))
        return ""

    def _beat_came(self, beat: Heartbeat, gap_s: float) -> str:
        moved = beat.progress != self._progress
        self._progress, self._beat = beat.progress, beat
        if self.phase is Phase.READY:
            idle = not beat.computing_tokens
            self._still_s = 0.0 if moved or idle else self._still_s + gap_s
            return self._stuck_in_frame() if self._still_s else ""
        if moved:
            self._step()
        else:
            self._still_s += gap_s
        limit_s = self._load_limit_s
        return f"is not loaded, and has made no progress for {limit_s:.0f} s" if self._still_s >= limit_s else ""

    def _stuck_in_frame(self) -> str:
        beat = self._beat
        limit_s = self._limits.frame_s(
            beat.computing_tokens,
            is_prefill=beat.computing_prefill,
            expected_s=beat.expected_s,
            stage_bytes=self._stage_bytes,
        )
        if self._still_s < limit_s:
            return ""
        what = "a prefill frame" if beat.computing_prefill else "a decode frame"
        return f"has been computing {what} of {beat.computing_tokens} tokens for {limit_s:.0f} s"

    def _load_moved(self, done: int) -> None:
        if done > self._loaded:
            self._loaded = done
            self._step()

    def _step(self) -> None:
        self._longest_step_s = max(self._longest_step_s, self._still_s)
        self._still_s = 0.0
        self._steps += 1

    @property
    def _load_limit_s(self) -> float:
        """Seconds for the next step of a load: from the steps so far once two are reported, before that from its size
        alone."""
        by_size = self._limits.load_s(self._stage_bytes)
        if self._steps < 3 or not self._loaded:
            return by_size
        return min(by_size, max(self._limits.load_step_s, self._limits.load_factor * self._longest_step_s))
