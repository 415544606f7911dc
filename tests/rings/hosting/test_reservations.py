"""Who may have a stage on this peer: ballots in order, memory held once, leases that end."""

from __future__ import annotations

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.machine.memory import MemoryReading, usable_bytes
from exo_mesh.rings.hosting.reservations import LEASE_S, MAX_PROMISES, Reservations

A1, B1, A2 = Ballot(1, "a"), Ballot(1, "b"), Ballot(2, "a")


def plan(ballot: Ballot, reserve: int = 100, instance: str = "m-1") -> Plan:
    stage = StagePlan("me", "dummy", Shard("m", 0, 4, 4), reserve)
    return Plan(instance, ballot, "m", "d", (stage,), 64, PlanInputs((("me", 1000),), "memory", 1))


def test_memory_is_held_and_a_second_plan_gets_what_is_left() -> None:
    held = Reservations()
    assert held.reserve(plan(A1, 600), 0, 1000, 0.0).granted
    assert (held.reserved_bytes, held.pending_bytes) == (600, 600)
    refused = held.reserve(plan(A1, 600, "other-1"), 0, 400, 0.0)
    assert not refused.granted and refused.beaten_by is None and refused.usable_bytes == 400
    assert "needs 0 MB" in refused.reason


def test_asking_twice_changes_nothing() -> None:
    held = Reservations()
    held.reserve(plan(A1), 0, 1000, 0.0)
    assert held.reserve(plan(A1), 0, 0, 1.0).granted and held.reserved_bytes == 100


def test_the_higher_ballot_wins_whatever_the_order() -> None:
    first = Reservations()
    first.reserve(plan(A1), 0, 1000, 0.0)
    assert first.reserve(plan(B1), 0, 900, 0.0).granted
    assert first.lease("m-1", A1) is None
    second = Reservations()
    second.reserve(plan(B1), 0, 1000, 0.0)
    beaten = second.reserve(plan(A1), 0, 900, 0.0)
    assert not beaten.granted and beaten.beaten_by == B1
    for held in (first, second):
        assert held.renew("m-1", A1, 0.0) is None and held.renew("m-1", B1, 0.0) is not None


def test_a_ready_plan_gives_way_only_to_somebody_who_knows_of_it() -> None:
    held = Reservations()
    held.reserve(plan(A1), 0, 1000, 0.0)
    lease = held.renew("m-1", A1, 0.0)
    assert lease is not None
    lease.ready = True
    assert held.reserve(plan(B1), 0, 900, 0.0).beaten_by == A1
    assert held.reserve(plan(A2), 0, 900, 0.0).granted


def test_what_the_beaten_plan_held_counts_for_the_new_one() -> None:
    held = Reservations()
    held.reserve(plan(A1, 800), 0, 1000, 0.0)
    assert held.reserve(plan(A2, 900), 0, 200, 0.0).granted


def test_a_lease_that_is_not_committed_expires() -> None:
    held = Reservations()
    held.reserve(plan(A1), 0, 1000, 10.0)
    assert held.expire(10.0 + LEASE_S - 1) == []
    assert len(held.expire(10.0 + LEASE_S)) == 1
    assert held.renew("m-1", A1, 0.0) is None and held.reserved_bytes == 0


def test_a_lease_lives_as_long_as_it_is_renewed() -> None:
    held = Reservations()
    held.reserve(plan(A1), 0, 1000, 0.0)
    for now in range(0, 1000, 10):
        assert held.expire(now) == [] and held.renew("m-1", A1, now) is not None
    assert len(held.expire(990 + LEASE_S)) == 1


def test_a_release_of_a_lower_ballot_changes_nothing_and_of_a_higher_one_fences() -> None:
    held = Reservations()
    held.reserve(plan(A2), 0, 1000, 0.0)
    assert held.release("m-1", B1) is None and held.reserved_bytes == 100
    assert held.release("m-1", Ballot(3, "a")) is not None
    assert held.reserve(plan(A2), 0, 1000, 0.0).beaten_by == Ballot(3, "a")


def test_promises_are_bounded() -> None:
    held = Reservations()
    for number in range(3 * MAX_PROMISES):
        held.release(f"m-{number}", A1)
    assert sum(held.promised(f"m-{number}") == A1 for number in range(3 * MAX_PROMISES)) == MAX_PROMISES


def test_usable_memory_leaves_headroom_counts_leases_once_and_obeys_the_cap() -> None:
    reading = MemoryReading(total_bytes=1000, available_bytes=600)
    assert usable_bytes(reading, None, reserved_bytes=0, pending_bytes=0) == 500
    assert usable_bytes(reading, None, reserved_bytes=300, pending_bytes=200) == 300
    assert usable_bytes(reading, 400, reserved_bytes=300, pending_bytes=0) == 100
    assert usable_bytes(reading, 400, reserved_bytes=500, pending_bytes=0) == 0


def test_one_ballot_is_for_one_plan() -> None:
    held = Reservations()
    assert held.reserve(plan(A1, 600), 0, 1000, 0.0).granted
    again = held.reserve(plan(A1, 700), 0, 400, 1.0)
    assert again.granted, "solved anew before it was committed"
    assert held.reserved_bytes == 700
    held.renew("m-1", A1, 0.0)
    refused = held.reserve(plan(A1, 500), 0, 1000, 2.0)
    assert not refused.granted and refused.beaten_by == A1
    held.release("m-1", A1)
    assert held.reserve(plan(A1, 500), 0, 1000, 3.0).beaten_by == A1, "nor for one that comes after it"
    assert held.reserve(plan(A2, 500), 0, 1000, 3.0).granted


def committed() -> Reservations:
    held = Reservations()
    held.reserve(plan(A1), 0, 1000, 0.0)
    lease = held.renew("m-1", A1, 0.0)
    assert lease is not None
    lease.ready = True
    return held


def test_an_adopted_plan_goes_on_and_its_old_owner_is_fenced() -> None:
    held = committed()
    assert held.adopt("m-1", A1, Ballot(2, "b")).granted
    assert held.renew("m-1", A1, 0.0) is None and held.release("m-1", A1) is None
    assert held.reserve(plan(A1), 0, 1000, 0.0).beaten_by == Ballot(2, "b")
    lease = held.renew("m-1", Ballot(2, "b"), 0.0)
    assert lease is not None and lease.plan.ballot == A1 and held.reserved_bytes == 100
    assert held.release("m-1", Ballot(2, "b")) is lease


def test_of_two_adopters_the_higher_ballot_wins_whatever_the_order() -> None:
    for order in ((Ballot(2, "b"), Ballot(2, "c")), (Ballot(2, "c"), Ballot(2, "b"))):
        held = committed()
        answers = [held.adopt("m-1", A1, ballot) for ballot in order]
        assert answers[0].granted and answers[1].granted == (order[1] > order[0])
        assert held.lease("m-1", Ballot(2, "c")) is not None and held.promised("m-1") == Ballot(2, "c")


def test_only_what_runs_can_be_adopted() -> None:
    held = Reservations()
    assert not held.adopt("m-1", A1, B1).granted
    held.reserve(plan(A1), 0, 1000, 0.0)
    assert not held.adopt("m-1", A1, B1).granted, "not committed"
    other = committed()
    assert not other.adopt("m-1", B1, A2).granted, "another plan"


def test_a_promise_outlives_its_lease() -> None:
    held = Reservations()
    held.reserve(plan(A2), 0, 1000, 10.0)
    held.expire(10.0 + LEASE_S)
    assert held.reserve(plan(B1), 0, 1000, 99.0).beaten_by == A2
