"""Who owns a ring after deaths and partitions; which stages are nobody's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.placing.ownership import ORPHAN_S, Claim, Orphans, adopter, beaten, claim


def an_instance(
    counter: int, proposer: str, *peers: str, state: InstanceState = InstanceState.READY, name: str = "m-1"
) -> InstanceInfo:
    count = len(peers)
    stages = tuple(StagePlan(one, "dummy", Shard("m", index, index + 1, count), 1) for index, one in enumerate(peers))
    plan = Plan(name, Ballot(counter, proposer), "m", "d", stages, 64, PlanInputs((), "memory", 1))
    return InstanceInfo(plan, state)


def test_the_lowest_member_adopts_a_whole_ready_ring_and_nobody_any_other() -> None:
    ring = an_instance(1, "x", "c", "b")
    assert adopter(ring, lambda peer_id: True) == "b"
    assert adopter(ring, lambda peer_id: peer_id != "b") is None, "its ring is broken"
    assert adopter(an_instance(1, "x", "b", state=InstanceState.LOADING), lambda peer_id: True) is None


def test_of_two_owners_exactly_one_keeps_the_ring() -> None:
    ring = an_instance(1, "x", "a", "b")
    records = [("x", ring), ("a", ring)]
    assert claim("x", ring.plan, ring.ballot, records) is Claim.KEEP
    assert claim("a", ring.plan, ring.ballot, records) is Claim.HAND_OVER


def test_whoever_adopted_a_ring_by_a_higher_ballot_keeps_it_and_the_stages_go_on() -> None:
    ring = an_instance(1, "x", "a", "b")
    adopted = replace(ring, adopted=Ballot(2, "a"))
    records = [("x", ring), ("a", adopted)]
    assert claim("x", ring.plan, ring.ballot, records) is Claim.HAND_OVER
    assert claim("a", ring.plan, adopted.ballot, records) is Claim.KEEP
    stage = ("m-1", adopted.ballot)
    assert beaten([stage], [ring, adopted]) == []
    orphans = Orphans()
    assert all(orphans.due({stage: False}, [adopted], float(now)) == [] for now in range(100))
    assert claim("a", ring.plan, adopted.ballot, [("y", an_instance(3, "y", "b"))]) is Claim.END


def test_a_lower_plan_ends_when_a_higher_one_is_ready_and_not_before() -> None:
    low = an_instance(1, "z", "a")
    loading = an_instance(2, "b", "b", state=InstanceState.LOADING)
    assert claim("z", low.plan, low.ballot, [("z", low), ("b", loading)]) is Claim.KEEP
    ready = an_instance(2, "b", "b")
    assert claim("z", low.plan, low.ballot, [("z", low), ("b", ready)]) is Claim.END
    assert claim("b", ready.plan, ready.ballot, [("z", low), ("b", ready)]) is Claim.KEEP
    assert claim("z", low.plan, low.ballot, [("b", an_instance(2, "b", "b", name="m-2"))]) is Claim.KEEP


def test_a_stage_without_record_and_without_follower_ends_after_its_time() -> None:
    orphans = Orphans()
    stage = ("m-1", Ballot(1, "x"))
    assert orphans.due({stage: False}, [], 100.0) == []
    assert orphans.due({stage: False}, [], 100.0 + ORPHAN_S - 0.1) == []
    assert orphans.due({stage: False}, [], 100.0 + ORPHAN_S) == [stage]


def test_a_stage_that_is_in_use_or_followed_is_no_orphan() -> None:
    orphans = Orphans()
    stage = ("m-1", Ballot(1, "x"))
    assert all(orphans.due({stage: True}, [], float(now)) == [] for now in range(100))


def test_a_stage_whose_place_others_have_taken_ends_at_once_unless_somebody_follows_it() -> None:
    """Its requests go on as soon as it ends."""
    stage = ("m-1", Ballot(1, "x"))
    higher = an_instance(2, "y", "b")
    assert Orphans().due({stage: False}, [higher], 0.0) == [stage]
    assert Orphans().due({stage: True}, [higher], 0.0) == [], "its owner has yet to see the record, and ends the ring"
    assert Orphans().due({stage: False}, [an_instance(2, "y", "b", state=InstanceState.LOADING)], 0.0) == []


def test_being_owned_again_starts_the_time_anew() -> None:
    orphans = Orphans()
    ring = an_instance(1, "x", "a")
    stage = ("m-1", ring.plan.ballot)
    orphans.due({stage: False}, [], 0.0)
    orphans.due({stage: False}, [ring], 5.0)
    assert orphans.due({stage: False}, [], 12.0) == []
    assert orphans.due({stage: False}, [], 12.0 + ORPHAN_S) == [stage]


def test_a_record_of_another_ballot_does_not_speak_for_a_stage() -> None:
    orphans = Orphans()
    stage = ("m-1", Ballot(1, "x"))
    higher = an_instance(2, "y", "b")
    orphans.due({stage: False}, [higher], 0.0)
    assert orphans.due({stage: False}, [higher], ORPHAN_S) == [stage]


def test_what_a_woken_node_must_free_first() -> None:
    mine = ("m-1", Ballot(1, "x"))
    assert beaten([mine], [an_instance(2, "y", "b")]) == [(*mine, Ballot(2, "y"))]
    assert beaten([mine], [an_instance(2, "y", "b", state=InstanceState.LOADING)]) == []
    assert beaten([mine], [an_instance(1, "x", "a")]) == []
    assert beaten([mine], [an_instance(9, "y", "b", name="m-2")]) == []


def test_a_ring_that_failed_a_request_here_is_not_used_until_somebody_has_adopted_it() -> None:
    unused: Any = None
    noted: dict[str, Ballot] = {}
    owned_rings: Any = SimpleNamespace(known=SimpleNamespace(note=noted.__setitem__))
    all_answer: Any = SimpleNamespace(unanswered_s=lambda peer_id: 0.0)
    known = Instances(all_answer, owned_rings, unused, unused, unused, unused)
    ring = an_instance(1, "x", "a", "b")
    adopted = replace(ring, adopted=Ballot(2, "a"))
    known.distrust(ring)
    assert not known.is_trusted(ring)
    assert known.is_trusted(adopted), "its new owner has reached every stage: no reason to place it anew"
    known.distrust(adopted)
    assert not known.is_trusted(adopted) and known.is_trusted(an_instance(3, "y", "b"))
    assert noted == {"m-1": Ballot(2, "a")}, "what is placed instead must be above it"
