"""Which stages computed an answer, and which took over: as the entry peer remembers it, and as its API shows it."""

from __future__ import annotations

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.rings.serving.answer_stages import (
    MAX_KEPT,
    MAX_LEGS,
    AnsweredRequest,
    AnsweredRequests,
    AnswerLeg,
    AnswerLegs,
    AnswerStage,
    stages_of,
)

FIRST, SECOND = Ballot(1, "a"), Ballot(2, "a")


def stage(name: str, start: int, stop: int, process: str = "1") -> AnswerStage:
    return AnswerStage((name,), (name,), "dummy", (start, stop), process)


ALICE, BOB, CAROL = stage("alice", 0, 18), stage("bob", 18, 36), stage("carol", 18, 36)


def leg(ballot: Ballot, from_token: int, *stages: AnswerStage) -> AnswerLeg:
    return AnswerLeg("m-1", ballot, from_token, stages)


def test_a_stage_that_took_over_is_new_and_its_pause_is_told() -> None:
    legs = AnswerLegs()
    legs.begin(leg(FIRST, 0, ALICE, BOB))
    legs.came(None)
    legs.begin(leg(SECOND, 17, ALICE, CAROL))
    assert legs.awaits_token
    legs.came(1.9)
    first, second = legs.describe()
    assert (first["from_token"], first["pause_s"], second["from_token"], second["pause_s"]) == (0, None, 17, 1.9)
    assert [one["is_new"] for one in first["stages"]] == [False, False]
    assert [(one["names"], one["layers"], one["is_new"]) for one in second["stages"]] == [
        (["alice"], [0, 18], False),
        (["carol"], [18, 36], True),
    ]


def test_a_process_that_was_started_again_is_new_and_the_same_ring_is_no_second_leg() -> None:
    legs = AnswerLegs()
    legs.begin(leg(FIRST, 0, ALICE, BOB))
    legs.begin(leg(FIRST, 4, ALICE, BOB))  # dialled again
    assert len(legs.describe()) == 1
    legs.begin(leg(SECOND, 5, ALICE, BOB))  # another owner of the same runners
    assert len(legs.describe()) == 1
    legs.begin(leg(Ballot(3, "a"), 6, ALICE, stage("bob", 18, 36, process="2")))
    assert [one["is_new"] for one in legs.describe()[-1]["stages"]] == [False, True]


def test_a_plan_that_the_view_shows_late_is_looked_up_later() -> None:
    legs = AnswerLegs()
    legs.begin(leg(FIRST, 0, ALICE, BOB))
    legs.begin(leg(SECOND, 3))
    assert len(legs.describe()) == 1
    legs.complete(lambda one: (ALICE, CAROL) if one.ballot == SECOND else ())
    assert legs.describe()[-1]["stages"][1]["names"] == ["carol"]


def test_stages_name_all_peers_of_a_tensor_group_and_need_no_endpoints() -> None:
    only = StagePlan("p1", "dummy", Shard("m", 0, 4, 4), 0)
    plan = Plan("m-1", FIRST, "m", "digest", (only,), 100, PlanInputs((), "memory", 1))
    loading = InstanceInfo(plan, InstanceState.LOADING)
    assert stages_of(loading, str.upper) == (AnswerStage(("p1",), ("P1",), "dummy", (0, 4), ""),)


def test_legs_and_requests_are_bounded() -> None:
    legs, kept = AnswerLegs(), AnsweredRequests()
    for number in range(3 * MAX_LEGS):
        legs.begin(leg(Ballot(number, "a"), number, ALICE if number % 2 else BOB))
    shown = legs.describe()
    assert (len(shown), shown[0]["from_token"], shown[-1]["from_token"]) == (MAX_LEGS, 0, 3 * MAX_LEGS - 1)
    for number in range(4 * MAX_KEPT):
        kept.add(AnsweredRequest(f"r{number}", "m", "", legs), (f"x{number}", "", f"t{number}"))
    assert kept.find("r0") is None and kept.find("") is None
    assert kept.find(f"x{4 * MAX_KEPT - 1}") is kept.find(f"r{4 * MAX_KEPT - 1}") is not None
