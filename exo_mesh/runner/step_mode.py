"""Decides in which thread a stage computes, from how long its steps take. Pure."""

from __future__ import annotations

from enum import Enum

SLOW_S = 0.002
"""A step or a send that takes longer than this is slow: handing a frame to another thread and back costs 0.2 ms."""

SLOW_STEPS = 4
"""Slow decode steps, less the quick ones between them, after which a stage counts as slow."""

QUICK_STEPS = 64
"""Quick decode steps after which a slow stage counts as quick again; each slow one between them takes back
SLOW_STEPS. Moving the event loop to another thread and back costs less than one of these steps."""


class StepMode(Enum):
    """INLINE: the task that read a frame computes it, in the event loop's thread. QUEUED: frames wait in a queue, and
    the next one is computed while the last one is sent. APART: the engine has a thread, the event loop another one."""

    INLINE = "inline"
    QUEUED = "queued"
    APART = "apart"


class StepModes:
    """The state machine of a stage:

    | mode           | event                                                    | next mode                            |
    | -------------- | -------------------------------------------------------- | ------------------------------------ |
    | INLINE         | SLOW_STEPS slow decode steps more than quick ones        | APART at the last stage, else QUEUED |
    | INLINE, QUEUED | sending a prefill chunk that was slow to compute is slow | APART                                |
    | QUEUED, APART  | QUICK_STEPS quick decode steps                           | INLINE                               |

    A rank of a tensor group never goes APART, because each frame is handed to the other ranks first; it goes QUEUED.
    """

    def __init__(self, *, is_last: bool, is_rank: bool) -> None:
        """is_last: the driver runs here, too, and samples and answers while the engine computes."""
        self.mode = StepMode.INLINE
        self._when_slow = StepMode.APART if is_last and not is_rank else StepMode.QUEUED
        self._may_part = not is_rank
        self._slow_steps = 0
        self._quick_steps = 0

    def decoded(self, compute_s: float) -> None:
        """A decode step took compute_s seconds."""
        is_slow = compute_s > SLOW_S
        if self.mode is StepMode.INLINE:
            self._slow_steps = max(0, self._slow_steps + (1 if is_slow else -1))
            if self._slow_steps >= SLOW_STEPS:
                self._enter(self._when_slow)
            return
        self._quick_steps = max(0, self._quick_steps - SLOW_STEPS) if is_slow else self._quick_steps + 1
        if self._quick_steps >= QUICK_STEPS:
            self._enter(StepMode.INLINE)

    def sent_chunk(self, send_s: float) -> None:
        """Sending a prefill chunk, which was slow to compute, took send_s seconds: the next chunk should be computed
        meanwhile."""
        if send_s > SLOW_S and self._may_part and self.mode is not StepMode.APART:
            self._enter(StepMode.APART)

    def _enter(self, mode: StepMode) -> None:
        self.mode = mode
        self._slow_steps = self._quick_steps = 0
