"""When a runner counts as stuck: by its want of progress, never by the time that it takes."""

from __future__ import annotations

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.reports import FromRunner, RunnerReady
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.stage import StageLoading
from exo_mesh.rings.hosting.runner_starter import RunnerPace
from exo_mesh.rings.hosting.stage_watch import Phase, StageWatch

LIMITS = RunnerLimits(first_message_s=20, silence_s=10, load_base_s=120, load_bytes_per_s=50e6)
GB = 10**9


def beat(progress: int, *, tokens: int = 0, prefill: bool = False, expected_s: float = 0.0) -> FromRunner:
    return Heartbeat(progress, computing_tokens=tokens, computing_prefill=prefill, expected_s=expected_s)


def loading(done: int, total: int = 10) -> FromRunner:
    return StageLoading(done, total)


def ready_watch(limits: RunnerLimits = LIMITS, stage_bytes: int = GB) -> StageWatch:
    watch = StageWatch(limits, stage_bytes)
    assert not watch.heard(RunnerReady(), 0.1)
    return watch


def seconds_until_stuck(watch: StageWatch, report: FromRunner, most_s: float = 10_000) -> float:
    for count in range(1, int(2 * most_s)):
        if watch.heard(report, 0.5):
            return count / 2
    return most_s


def test_silence_is_longer_allowed_before_the_first_report() -> None:
    watch = StageWatch(LIMITS, GB)
    assert not watch.silent(19.9) and "20 s" in watch.silent(0.1)
    watch.heard(beat(0), 0.1)
    assert watch.phase is Phase.LOADING
    assert not watch.silent(9.9) and "10 s" in watch.silent(0.1)


def test_a_load_that_gets_on_is_never_stuck_however_slow() -> None:
    watch = StageWatch(LIMITS, GB)
    for step in range(100):
        for _ in range(200):  # 100 s of heartbeats for each of 100 steps
            assert not watch.heard(beat(0), 0.5)
        assert not watch.heard(loading(step + 1, 100), 0.1)


def test_a_load_that_says_nothing_gets_the_time_that_its_bytes_take() -> None:
    assert seconds_until_stuck(StageWatch(LIMITS, 5 * GB), beat(0)) == 220


def test_a_load_that_has_shown_its_pace_and_then_stands_still_is_stuck_sooner() -> None:
    watch = StageWatch(LIMITS, 50 * GB)  # 1,120 s by its size
    for step in range(4):
        watch.heard(loading(step + 1), 0.1)
        watch.heard(beat(step), 0.5)
    assert 115 <= seconds_until_stuck(watch, beat(3)) <= 125


def test_an_idle_runner_is_never_stuck() -> None:
    assert seconds_until_stuck(ready_watch(), beat(7), 2000) == 2000


def test_a_frame_is_stuck_after_many_times_what_frames_like_it_take() -> None:
    assert seconds_until_stuck(ready_watch(), beat(0, tokens=4, expected_s=0.05)) == 10
    assert seconds_until_stuck(ready_watch(), beat(0, tokens=4, expected_s=3.0)) == 60
    assert seconds_until_stuck(ready_watch(), beat(0, tokens=512, prefill=True, expected_s=0.1)) == 15
    assert seconds_until_stuck(ready_watch(), beat(0, tokens=512, prefill=True, expected_s=40.0)) == 800


def test_the_first_frames_get_time_by_the_size_of_the_stage() -> None:
    assert 120 <= seconds_until_stuck(ready_watch(), beat(0, tokens=1)) < 121
    slow_board = ready_watch(stage_bytes=14 * GB)
    assert 475 < seconds_until_stuck(slow_board, beat(0, tokens=512, prefill=True)) < 480


def test_a_slow_prefill_whose_frames_end_is_never_stuck() -> None:
    watch = ready_watch()
    for frame in range(50):
        for _ in range(2 * 100):
            assert not watch.heard(beat(frame, tokens=512, prefill=True, expected_s=100.0), 0.5)


def test_a_pause_of_the_machine_is_no_standstill_of_the_runner() -> None:
    watch = ready_watch()
    assert not watch.heard(beat(7, tokens=4, expected_s=0.01), 3600)
    assert not watch.heard(beat(7, tokens=4, expected_s=0.01), 0.5)


def test_measured_paces_grant_more_time_and_never_less() -> None:
    pace = RunnerPace()
    assert pace.scaled(LIMITS, "numpy") == LIMITS
    pace.started(0.5)
    pace.loaded("numpy", GB, 0.1)
    assert pace.scaled(LIMITS, "numpy") == LIMITS, "a fast machine is no reason to be stricter"
    pace.started(4.0)
    pace.loaded("numpy", GB, 100.0)  # 10 MB/s: a USB stick
    scaled = pace.scaled(LIMITS, "numpy")
    assert scaled.first_message_s == 32 and scaled.load_bytes_per_s == 10e6 / 8
    assert pace.scaled(LIMITS, "torch").load_bytes_per_s == LIMITS.load_bytes_per_s
