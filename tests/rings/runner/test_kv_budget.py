"""What a stage can hold, by what its engine takes; and that the driver keeps to what the poorest stage can."""

from __future__ import annotations

import pytest

from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.frame import Copy, Frame, Insert, Keep, Op, Remove, Retain, Row
from exo_mesh.domain.plan import Ballot
from exo_mesh.rings.runner.scheduling.kv_budget import LOOK_EVERY, KvBudget
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler
from exo_mesh.rings.runner.scheduling.sequence import Sequence
from tests.rings.runner.test_stage_and_driver import TinyEngine

BALLOT = Ballot(1, "test")
WEIGHTS = 10_000


class Hungry(TinyEngine):
    """Takes 10,000 bytes of weights, and 100 for each position up to the next multiple of `step`."""

    def __init__(self, step: int = 1) -> None:
        super().__init__(True, False)
        self.step = step
        self.lengths: dict[int, int] = {}

    def memory_bytes(self) -> int:
        return WEIGHTS + sum(100 * self.step * -(-n // self.step) for n in self.lengths.values())


def budget_of(engine: Hungry, kv_bytes: int = 50_000, planned: int = 500) -> KvBudget:
    return KvBudget(engine, ENGINE_OVERHEAD_BYTES + WEIGHTS + kv_bytes if kv_bytes else 0, planned)


def hold(engine: Hungry, budget: KvBudget, sequence: int, length: int) -> int:
    engine.lengths[sequence] = length
    rows = (Row(sequence, 0, length),)
    return budget.computed(Frame(BALLOT, 1, rows, (0,) * length, (Insert(sequence, 1000),)))


def test_an_engine_that_takes_what_was_planned_holds_what_was_planned() -> None:
    engine = Hungry()
    budget = budget_of(engine)
    assert [hold(engine, budget, 1, 100), hold(engine, budget, 2, 300), hold(engine, budget, 1, 200)] == [500] * 3


def test_room_to_grow_is_missing_elsewhere_and_comes_back() -> None:
    engine = Hungry(step=64)
    budget = budget_of(engine)
    assert hold(engine, budget, 1, 10) == 500 - 54
    assert hold(engine, budget, 2, 65) == 500 - 54 - 63
    del engine.lengths[2]
    assert budget.computed(Frame(BALLOT, 3, ops=(Remove(2),))) == 500 - 54


def test_sequences_may_fill_the_buffers_that_they_have_while_the_stage_keeps_to_its_plan() -> None:
    engine = Hungry(step=64)
    budget = budget_of(engine, kv_bytes=128 * 100, planned=128)
    hold(engine, budget, 1, 10)
    assert (hold(engine, budget, 2, 40), budget.slack_tokens) == (50, 78), "a third one has no place, both may grow"
    hold(engine, budget, 1, 64)
    assert (hold(engine, budget, 2, 64), budget.slack_tokens) == (128, 0)
    assert (hold(engine, budget, 2, 65), budget.slack_tokens) == (129 - 64, 0), "it takes more than was planned"


def test_the_engine_is_asked_from_time_to_time_only() -> None:
    engine = Hungry()
    budget = budget_of(engine)
    hold(engine, budget, 1, 100)
    engine.lengths[1] = 300  # it takes more than the frames say
    answers = [budget.computed(Frame(BALLOT, 2 + n, (Row(1, 100 + n, 1),), (0,))) for n in range(LOOK_EVERY)]
    assert set(answers[:-1]) == {500}
    assert answers[-1] == 500 - 200 + LOOK_EVERY


def test_weights_that_leave_nothing_let_one_request_run_at_a_time() -> None:
    engine = Hungry()
    budget = KvBudget(engine, ENGINE_OVERHEAD_BYTES + WEIGHTS // 2, 500)
    assert hold(engine, budget, 1, 10) == 0
    scheduler = Scheduler(SchedulerLimits(2), Pace(2))
    scheduler.room = 0
    for number in (1, 2):
        scheduler.submit(Sequence(number, [0] * 10))
    assert [sequence.id for sequence in scheduler.admit()] == [1]


def test_without_a_reservation_a_stage_holds_what_was_planned() -> None:
    engine = Hungry()
    assert hold(engine, budget_of(engine, kv_bytes=0), 1, 400) == 500


def test_who_outgrows_the_poorest_stage_waits_and_comes_back() -> None:
    scheduler = Scheduler(SchedulerLimits(2, max_tokens=1000), Pace(2))
    for number in (1, 2, 3):
        scheduler.submit(Sequence(number, [0] * 100))
    assert len(list(scheduler.admit())) == 3
    scheduler.room = 250
    assert [sequence.id for sequence in scheduler.evict()] == [3]
    assert list(scheduler.admit()) == []
    scheduler.room = 400
    assert [sequence.id for sequence in scheduler.admit()] == [3]


def test_positions_of_a_copy_count_as_soon_as_it_is_made() -> None:
    engine = Hungry()
    budget = budget_of(engine)
    before = hold(engine, budget, 1, 100)
    engine.lengths[2] = 80
    assert budget.computed(Frame(BALLOT, 2, ops=(Copy(2, 1, 80, 1000),))) == before
    engine.lengths[2] = 0
    assert budget.computed(Frame(BALLOT, 3, ops=(Remove(2),))) == before


class Copying(Hungry):
    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None: ...


def applied(budget: KvBudget, *ops: Op) -> KvBudget:
    budget.computed(Frame(BALLOT, 2, ops=ops))
    return budget


def test_kept_sequences_count_until_they_are_removed() -> None:
    engine = Copying()
    budget = budget_of(engine)
    hold(engine, budget, 1, 100)
    hold(engine, budget, 2, 50)
    applied(budget, Keep(1))
    assert (budget.num_kept, budget.kept_bytes) == (1, 10_000)
    applied(budget, Copy(3, 2, 40, 99), Keep(3))
    assert (budget.num_kept, budget.kept_bytes) == (2, 14_000)
    assert applied(budget, Remove(1)).num_kept == 1
    assert applied(budget, Retain((2,))).num_kept == 0


def test_what_was_lost_over_a_change_of_the_plan_is_not_kept() -> None:
    engine = Copying()
    budget = budget_of(engine)
    hold(engine, budget, 1, 100)
    applied(budget, Keep(1))
    budget.forget()
    engine.lengths.clear()
    assert applied(budget, Retain((1,)), Keep(1)).num_kept == 0
    assert budget.tokens == 500


@pytest.mark.parametrize(("limit", "tokens"), [(None, 500), (0, 0), (20_000, 200), (2**63 - 1, 500)])
def test_the_limit_of_the_prefix_cache_is_in_positions_of_this_stage(limit: int | None, tokens: int) -> None:
    reserve_bytes = ENGINE_OVERHEAD_BYTES + WEIGHTS + 50_000
    assert KvBudget(Copying(), reserve_bytes, 500, limit).most_kept_tokens == tokens
    assert KvBudget(Hungry(), reserve_bytes, 500, limit).most_kept_tokens == 0, "it cannot copy"
