"""The state machine that decides in which thread a stage computes."""

from __future__ import annotations

import pytest

from exo_mesh.rings.runner.step_mode import BUSY_STEPS, FREE_STEPS, PAUSE, SLOW_S, StepMode, StepModes

SLOW, QUICK = 2 * SLOW_S, SLOW_S / 2


def modes_after(seconds: list[float], *, is_last: bool = True, is_rank: bool = False) -> StepModes:
    modes = StepModes(is_last=is_last, is_rank=is_rank)
    for one in seconds:
        modes.decoded(one)
    return modes


def test_few_slow_steps_change_nothing() -> None:
    assert modes_after([SLOW] * (BUSY_STEPS - 1)).mode is StepMode.INLINE
    assert modes_after([SLOW, QUICK] * 100).mode is StepMode.INLINE, "as many quick ones as slow ones"


@pytest.mark.parametrize(
    ("is_last", "is_rank", "mode"),
    [
        (True, False, StepMode.APART),
        (False, False, StepMode.QUEUED),
        (True, True, StepMode.QUEUED),
        (False, True, StepMode.QUEUED),
    ],
)
def test_slow_steps_are_queued_or_computed_apart(is_last: bool, is_rank: bool, mode: StepMode) -> None:
    modes = modes_after([SLOW] * BUSY_STEPS, is_last=is_last, is_rank=is_rank)
    assert modes.mode is mode
    for _ in range(FREE_STEPS - 1):
        modes.decoded(QUICK)
    assert modes.mode is mode
    modes.decoded(QUICK)
    assert modes.mode is StepMode.INLINE
    for _ in range(BUSY_STEPS):
        modes.decoded(SLOW)
    assert modes.mode is mode, "and slow again"


def test_a_stage_that_is_slow_now_and_then_stays_in_slow_mode() -> None:
    modes = modes_after([SLOW] * BUSY_STEPS)
    for _ in range(100):
        modes.decoded(SLOW)
        for _ in range(BUSY_STEPS):
            modes.decoded(QUICK)
    assert modes.mode is StepMode.APART


def test_slow_steps_after_pauses_stay_inline() -> None:
    modes = modes_after([])
    for _ in range(100):
        modes.decoded(SLOW, PAUSE * SLOW)
    assert modes.mode is StepMode.INLINE
    for _ in range(BUSY_STEPS):
        modes.decoded(SLOW, PAUSE * SLOW / 2)
    assert modes.mode is StepMode.APART, "a second batch came on the ring"
    for _ in range(FREE_STEPS):
        modes.decoded(SLOW, SLOW)
    assert modes.mode is StepMode.INLINE, "and is gone again"


def test_a_chunk_that_is_slow_to_send_parts_the_threads() -> None:
    modes = modes_after([], is_last=False)
    modes.sent_chunk(QUICK)
    assert modes.mode is StepMode.INLINE
    modes.sent_chunk(SLOW)
    assert modes.mode is StepMode.APART
    rank = modes_after([], is_rank=True)
    rank.sent_chunk(SLOW)
    assert rank.mode is StepMode.INLINE, "a rank hands each frame to the others first"
