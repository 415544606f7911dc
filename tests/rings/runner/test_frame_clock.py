"""What a runner tells of the frame that its engine is at."""

from __future__ import annotations

from exo_mesh.rings.runner.frame_clock import ENOUGH, FrameClock


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def frame(clock: FrameClock, time: Time, tokens: int, seconds: float, *, is_prefill: bool) -> float:
    clock.begin(tokens, is_prefill=is_prefill)
    time.now += seconds
    return clock.end()


def test_nothing_is_expected_before_enough_frames_of_a_kind() -> None:
    time = Time()
    clock = FrameClock(time)
    for _ in range(ENOUGH):
        clock.begin(100, is_prefill=True)
        assert clock.expected_s() == 0
        time.now += 2.0
        assert clock.end() == 2.0 and clock.tokens == 0
    clock.begin(100, is_prefill=True)
    assert clock.expected_s() == 2.0
    clock.end()
    clock.begin(4, is_prefill=False)
    assert clock.expected_s() == 0, "of decode frames nothing is known"


def test_prefill_is_expected_per_token_and_decode_per_frame() -> None:
    time = Time()
    clock = FrameClock(time)
    for _ in range(ENOUGH):
        frame(clock, time, 50, 1.0, is_prefill=True)
        frame(clock, time, 2, 0.1, is_prefill=False)
    clock.begin(200, is_prefill=True)
    assert abs(clock.expected_s() - 4.0) < 1e-9
    clock.end()
    clock.begin(32, is_prefill=False)
    assert abs(clock.expected_s() - 0.1) < 1e-9
    assert (clock.prefill_frames, clock.decode_frames) == (ENOUGH + 1, ENOUGH)


def test_a_machine_that_gets_slower_is_believed_in_time() -> None:
    time = Time()
    clock = FrameClock(time)
    for seconds in [0.1] * ENOUGH + [1.0] * 60:
        frame(clock, time, 1, seconds, is_prefill=False)
    clock.begin(1, is_prefill=False)
    assert 0.99 < clock.expected_s() <= 1.0


def test_a_frame_without_tokens_is_seen_all_the_same() -> None:
    clock = FrameClock(Time())
    clock.begin(0, is_prefill=False)
    assert clock.tokens == 1
