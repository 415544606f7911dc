"""What is not tried again on a node, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.errors import ReservationError
from exo_mesh.machine.disk import Disk
from exo_mesh.rings.hosting.breaker import MAX_KEYS, MOST_OPEN_S, Breaker
from exo_mesh.rings.hosting.guard import Guard
from exo_mesh.rings.hosting.out_of_memory import OutOfMemory
from exo_mesh.rings.hosting.quarantine import Quarantine
from exo_mesh.rings.hosting.runner_exit import End

KEY = ("digest", "numpy")
PLAN = Plan(
    "m-1", Ballot(1, "me"), "m", "d", (StagePlan("me", "numpy", Shard("m", 0, 4, 4), 1),), 64,
    PlanInputs((("me", 9),), "memory", 1),
)  # fmt: skip


class Time:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def crash(breaker: Breaker, *times: float) -> list[bool]:
    return [breaker.crashed(KEY, "m", "boom", now) for now in times]


def test_three_crashes_within_a_minute_open_the_breaker_once() -> None:
    breaker = Breaker()
    assert crash(breaker, 0, 30, 59) == [False, False, True]
    assert "boom" in str(breaker.loop(KEY, 60)) and "crashed 3 times" in str(breaker.loop(KEY, 60))
    assert crash(breaker, 61) == [False], "it is open already"
    assert breaker.loop(KEY, 118.9) is not None and breaker.loop(KEY, 119) is None
    assert breaker.loop(("other", "numpy"), 60) is None and breaker.loop(("digest", "torch"), 60) is None


def test_crashes_that_are_far_apart_are_no_loop() -> None:
    assert not any(crash(Breaker(), 0, 31, 61, 92, 122))


def test_a_crash_at_the_first_try_afterwards_opens_it_for_longer_up_to_a_bound() -> None:
    breaker, now = Breaker(), 0.0
    crash(breaker, 0, 0, 0)
    lasted = []
    for _ in range(6):
        loop = breaker.loop(KEY, now)
        assert loop is not None
        lasted.append(loop.left_s)
        now += loop.left_s + 1
        assert breaker.loop(KEY, now) is None
        assert crash(breaker, now) == [True]
    assert lasted == [60, 120, 240, 480, MOST_OPEN_S, MOST_OPEN_S]


def test_a_success_in_between_starts_it_anew() -> None:
    breaker = Breaker()
    crash(breaker, 0, 0, 0)
    assert crash(breaker, 200) == [False], "long after the refusal ended: this is a first crash again"


def test_what_the_breaker_remembers_is_bounded() -> None:
    breaker = Breaker()
    for number in range(3 * MAX_KEYS):
        breaker.crashed((str(number), "numpy"), "m", "boom", 0)
    assert len(breaker._records) == MAX_KEYS


def guard(tmp_path: Path, options: dict[str, str] | None = None, time: Time | None = None) -> Guard:
    quarantine = Quarantine(tmp_path / "quarantine.json", Disk(tmp_path), now=time or Time())
    return Guard("me", quarantine, options or {}, time or Time())


def test_a_wedge_is_never_tried_again_here_not_even_after_a_restart(tmp_path: Path) -> None:
    time = Time()
    first = guard(tmp_path, time=time)
    first.check(PLAN, 0)
    first.ended(PLAN, 0, End.WEDGED, "not loaded for 5 s")
    for one in (first, guard(tmp_path, time=time)):
        with pytest.raises(ReservationError, match=r"got stuck.*not loaded for 5 s.*another engine") as caught:
            one.check(PLAN, 0)
        assert caught.value.why == "quarantined"
        (reason,) = one.reasons()
        assert reason.code == "quarantined" and "quarantine" in reason.remedy
    guard(tmp_path, {"other": "flags"}, time).check(PLAN, 0)
    time.now += 600
    guard(tmp_path, time=time).check(PLAN, 0)


def test_a_clock_that_was_set_back_does_not_make_a_quarantine_last(tmp_path: Path) -> None:
    time = Time()
    guard(tmp_path, time=time).ended(PLAN, 0, End.WEDGED, "stuck")
    time.now -= 86_400
    guard(tmp_path, time=time).check(PLAN, 0)


@pytest.mark.parametrize("end", [End.CRASHED, End.STALLED])
def test_crashes_and_stalls_are_tried_again_until_it_is_a_loop(tmp_path: Path, end: End) -> None:
    one = guard(tmp_path)
    for _ in range(3):
        one.check(PLAN, 0)
        one.ended(PLAN, 0, end, "boom")
    with pytest.raises(ReservationError, match="boom") as caught:
        one.check(PLAN, 0)
    assert caught.value.why == "crash_loop" and one.reasons()[0].code == "crash_loop"
    assert one.lift() == 1
    one.check(PLAN, 0)


@pytest.mark.parametrize("end", [End.STOPPED, End.LOST, End.REFUSED])
def test_what_is_nobodys_fault_here_does_not_count(tmp_path: Path, end: End) -> None:
    one = guard(tmp_path)
    for _ in range(10):
        one.ended(PLAN, 0, end, "as asked")
    one.check(PLAN, 0)
    assert one.reasons() == []


def test_a_runner_that_had_worked_is_no_part_of_a_loop(tmp_path: Path) -> None:
    one = guard(tmp_path)
    for frames in (1000, 5, 1000, 5, 1000, 99):
        one.check(PLAN, 0)
        one.ended(PLAN, 0, End.CRASHED, "boom", frames)
    with pytest.raises(ReservationError, match="crashed 3 times"):
        one.check(PLAN, 0)


def test_a_runner_that_ended_for_want_of_memory_gets_less_and_counts_also_if_it_had_worked(tmp_path: Path) -> None:
    time = Time()
    one = guard(tmp_path, time=time)
    assert one.most_bytes(PLAN, 0) is None
    stage = replace(PLAN.stages[0], reserve_bytes=ENGINE_OVERHEAD_BYTES + 1000)
    large = replace(PLAN, stages=(stage,))
    one.ended(large, 0, End.OOM, "was killed", frames=1000)
    assert one.most_bytes(large, 0) == ENGINE_OVERHEAD_BYTES + 800
    assert [reason.code for reason in one.reasons()] == ["oom"]
    for _ in range(2):
        one.ended(PLAN, 0, End.OOM, "was killed", frames=1000)
    with pytest.raises(ReservationError, match="crashed 3 times"):
        one.check(PLAN, 0)
    time.now += 600
    assert one.most_bytes(PLAN, 0) is None and not one.reasons()


@pytest.mark.parametrize(
    ("before", "after", "level", "is_oom"),
    [
        ("oom_kill 3\n", "oom_kill 4\n", 0, True),
        ("oom_kill 3\n", "oom_kill 3\n", 2, False),
        ("nr_free_pages 9\n", "nr_free_pages 9\n", 2, True),
        ("nr_free_pages 9\n", "nr_free_pages 9\n", 0, False),
    ],
)
def test_a_kill_for_memory_is_told_from_one_by_hand(
    tmp_path: Path, before: str, after: str, level: int, is_oom: bool
) -> None:
    file = tmp_path / "vmstat"
    file.write_text(before)
    memory = OutOfMemory(file)
    memory.look(now=10.0)
    memory.level = level
    file.write_text(after)
    assert memory.killed(-9) is is_oom
    memory.look(now=11.0)
    assert not memory.killed(-15) and not memory.killed(1)


def test_a_quarantine_file_that_is_damaged_is_none(tmp_path: Path) -> None:
    (tmp_path / "quarantine.json").write_text("{half a")
    guard(tmp_path).check(PLAN, 0)
