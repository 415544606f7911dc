"""Decides in which thread a stage computes, from how long its steps take and how soon they follow each other. Pure."""

from __future__ import annotations

from enum import Enum

SLOW_S = 0.002
"""A step or a send that takes longer than this is slow: handing a frame to another thread and back costs 0.2 ms."""

BUSY_STEPS = 4
"""Busy decode steps, less the others between them, after which a stage counts as busy."""

FREE_STEPS = 64
"""Decode steps that are quick or follow a pause, after which a busy stage counts as free again; each busy one between
them takes back BUSY_STEPS. Moving the event loop to another thread and back costs less than one of these steps."""

PAUSE = 0.5
"""A stage has paused before a step if it had nothing to compute for this part of the time that the step takes. The
frames of one batch come once a lap; with as many batches as stages, a stage pauses only for the time of a hop."""


class StepMode(Enum):
    """INLINE: the task that read a frame computes it, in the event loop's thread, and sends it. QUEUED: the next frame
    is read before one is computed, and computed while that one is sent. APART: the engine has a thread, the event loop
    another one."""

    INLINE = "inline"
    QUEUED = "queued"
    APART = "apart"


class StepModes:
    """The state machine of a stage:

    | mode           | event                                                    | next mode                            |
    | -------------- | -------------------------------------------------------- | ------------------------------------ |
    | INLINE         | BUSY_STEPS busy decode steps more than others            | APART at the last stage, else QUEUED |
    | INLINE, QUEUED | sending a prefill chunk that was slow to compute is slow | APART                                |
    | QUEUED, APART  | FREE_STEPS other decode steps                            | INLINE                               |

    A busy step is slow and follows the one before it without a pause.

    A stage that pauses before a slow step has nothing else to do meanwhile: INLINE is then the shortest way to the next
    stage, by 0.1 ms at most stages and 0.3 ms at the last one.

    A rank of a tensor group never goes APART, because each frame is handed to the other ranks first; it goes QUEUED.
    """

    def __init__(self, *, is_last: bool, is_rank: bool) -> None:
        """is_last: the driver runs here, too, and samples and answers while the engine computes."""
        self.mode = StepMode.INLINE
        self._when_busy = StepMode.APART if is_last and not is_rank else StepMode.QUEUED
        self._may_part = not is_rank
        self._busy_steps = 0
        self._free_steps = 0

    def decoded(self, compute_s: float, pause_s: float = 0.0) -> None:
        """A decode step took compute_s seconds, after pause_s seconds in which the stage had nothing to compute."""
        is_busy = compute_s > SLOW_S and pause_s < PAUSE * compute_s
        if self.mode is StepMode.INLINE:
            self._busy_steps = max(0, self._busy_steps + (1 if is_busy else -1))
            if self._busy_steps >= BUSY_STEPS:
                self._enter(self._when_busy)
            return
        self._free_steps = max(0, self._free_steps - BUSY_STEPS) if is_busy else self._free_steps + 1
        if self._free_steps >= FREE_STEPS:
            self._enter(StepMode.INLINE)

    def sent_chunk(self, send_s: float) -> None:
        """Sending a prefill chunk, which was slow to compute, took send_s seconds: the next chunk should be computed
        meanwhile."""
        if send_s > SLOW_S and self._may_part and self.mode is not StepMode.APART:
            self._enter(StepMode.APART)

    def _enter(self, mode: StepMode) -> None:
        self.mode = mode
        self._busy_steps = self._free_steps = 0
