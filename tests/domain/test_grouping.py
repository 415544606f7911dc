"""Which peers are joined to a tensor group, what it counts for, and what those are told who ask for too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.footprint import stage_bytes
from exo_mesh.domain.group_placement import as_pipeline, groups_of, pinned_groups, place_grouped
from exo_mesh.domain.grouping import GroupFacts, GroupWish, groupings, joined
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.pinning import Pin, solve_pinned
from exo_mesh.domain.placement import solve
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.recovery import recover
from exo_mesh.domain.ring_candidates import Candidate, Surroundings
from exo_mesh.domain.tensor_group import TensorGroup, sharded
from exo_mesh.errors import InputError, PlacementError
from tests.domain.test_placement import GB, LLAMA_8B
from tests.domain.test_policies import FLAT

ANY = GroupFacts(obstacle=lambda engine, size: "" if engine == "mlx" else f"engine {engine} cannot form tensor groups")
OPEN = GroupWish()
RING = GroupWish(backend="ring")


def macs(*gb: float, engine: str = "mlx") -> list[Candidate]:
    return [Candidate(chr(97 + i), int(size * GB), engine) for i, size in enumerate(gb)]


def cabled(*pairs: str, obstacle: Callable[[str, int], str] = ANY.obstacle) -> GroupFacts:
    """A cable for each "ab"."""
    rdma = {(a, b): f"rdma_{a}{b}" for pair in pairs for a, b in (pair, pair[::-1])}
    return GroupFacts(rdma, obstacle)


def sets(candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts) -> list[list[str]]:
    """The groups of each grouping, each as its peers: ["ab", "cd"]."""
    found = groupings(candidates, wish, facts)
    return [["".join(one.group.peers) for one in grouping if one.group] for grouping in found]


def placed(
    candidates: list[Candidate],
    wish: GroupWish = OPEN,
    facts: GroupFacts = ANY,
    *,
    card: ModelCard = FLAT,
    min_peers: int = 1,
    policy: str = "memory",
) -> Plan:
    def attempt(grouped: Sequence[Candidate], min_stages: int) -> Plan:
        return solve(
            card, grouped, policy=policy, min_peers=min_stages, context_limit=2048, instance_id="i",
            ballot=Ballot(1, "a"),
        )  # fmt: skip

    return place_grouped(candidates, wish, facts, min_peers, attempt)


def shape(plan: Plan) -> list[tuple[str, int]]:
    return [("".join(stage.peers), len(stage.shard)) for stage in plan.stages]


# who


def test_a_group_over_rdma_needs_a_cable_between_any_two() -> None:
    assert sets(macs(8, 8, 8), GroupWish(), cabled("ab", "bc")) == [["ab"], ["bc"]]
    assert ["abc"] in sets(macs(8, 8, 8), GroupWish(), cabled("ab", "bc", "ac"))
    four = macs(8, 8, 8, 8)
    all_six = ["".join(pair) for pair in combinations("abcd", 2)]
    assert ["abcd"] in sets(four, GroupWish(), cabled(*all_six))
    assert ["abcd"] not in sets(four, GroupWish(), cabled(*all_six[1:]))
    assert ["ab", "cd"] in sets(four, GroupWish(), cabled("ab", "cd"))
    assert sets(four, GroupWish(), cabled()) == []


def test_a_ring_of_cables_is_for_those_who_ask_for_it() -> None:
    loop = cabled("ab", "bc", "cd", "da")
    four = macs(8, 8, 8, 8)
    assert ["abcd"] not in sets(four, GroupWish(), loop)
    assert sets(four, GroupWish(4, backend="jaccl-ring"), loop) == [["abcd"]]


def test_the_devices_of_the_cables_are_in_the_plan() -> None:
    (grouping,) = groupings(macs(8, 8), GroupWish(), cabled("ab"))
    assert grouping[0].group == TensorGroup("jaccl", ("a", "b"), ((None, "rdma_ab"), ("rdma_ba", None)))
    (grouping,) = groupings(macs(8, 8), RING, ANY)
    assert grouping[0].group == TensorGroup("ring", ("a", "b"))


def test_a_device_without_queue_pairs_left_is_no_part_of_another_group() -> None:
    def left(number: int) -> GroupFacts:
        return replace(cabled("ab"), queue_pairs={("a", "rdma_ab"): number, ("b", "rdma_ba"): 10})

    assert sets(macs(8, 8), OPEN, left(1)) == [["ab"]]
    assert sets(macs(8, 8), OPEN, left(0)) == []
    with pytest.raises(PlacementError, match="rdma_ab of a has 0 queue pairs left and this group needs 1"):
        groupings(macs(8, 8), GroupWish(2), left(0))
    assert sets(macs(8, 8), RING, left(0)) == [["ab"]], "TCP needs none"


def test_peers_whose_engines_differ_are_no_group() -> None:
    one, two = macs(8, 8)
    newer = replace(two, builds=(("mlx", "mlx-metal 0.33"),))
    assert sets([one, newer], RING, ANY) == []
    with pytest.raises(PlacementError, match=r"their engines differ: mlx, mlx-metal 0\.33"):
        groupings([one, newer], GroupWish(2, backend="ring"), ANY)
    assert sets(macs(8, 8, engine="torch"), RING, ANY) == []


def test_a_size_that_does_not_divide_the_heads_is_passed_over_or_refused_with_the_numbers() -> None:
    def obstacle(engine: str, size: int) -> str:
        return "" if 8 % size == 0 else f"{size} ranks cannot share out evenly: 8 KV heads"

    facts = GroupFacts(obstacle=obstacle)
    assert {len(names[0]) for names in sets(macs(8, 8, 8, 8), RING, facts)} == {2, 4}
    with pytest.raises(PlacementError, match="3 ranks cannot share out evenly: 8 KV heads") as refused:
        groupings(macs(8, 8, 8), GroupWish(3, backend="ring"), facts)
    assert refused.value.reason == "tensor_group" and "tensor_group: 1" in refused.value.remedy


def test_peers_that_failed_as_a_group_are_none_unless_somebody_insists() -> None:
    facts = replace(ANY, unfit={frozenset("ab"): "they failed"})
    assert sets(macs(8, 8), RING, facts) == []
    assert sets(macs(8, 8), GroupWish(2, backend="ring"), facts) == [["ab"]]


def test_groups_by_name_are_taken_as_they_are() -> None:
    assert sets(macs(8, 4, 2), GroupWish(members=(("c", "a"),), backend="ring"), ANY) == [["ca"]]
    for members in ((("a", "x"),), (("a",),), (("a", "b"), ("b", "c"))):
        with pytest.raises(InputError) as refused:
            groupings(macs(8, 4, 2), GroupWish(members=members, backend="ring"), ANY)
        assert refused.value.param == "groups"
    with pytest.raises(PlacementError, match="no RDMA link is up between a and b"):
        groupings(macs(8, 8), GroupWish(members=(("a", "b"),)), ANY)


def test_a_group_that_was_asked_for_falls_back_to_tcp_where_that_is_allowed() -> None:
    two = macs(8, 8)
    allowed = replace(ANY, tcp_fallback=True)
    for wish in (GroupWish(2), GroupWish(2, backend="jaccl"), GroupWish(members=(("a", "b"),), backend="jaccl-ring")):
        ((group, *_), *_) = groupings(two, wish, allowed)
        assert group.group is not None and group.group.backend == "ring" and not group.group.rdma
        with pytest.raises(PlacementError, match="no RDMA link is up"):
            groupings(two, wish, ANY)
    assert groupings(two, GroupWish(), allowed) == [], "nobody gets a group over TCP unasked"


def test_who_asks_for_a_group_gets_it_with_an_engine_that_can_be_one() -> None:
    torch_first = Candidate("b", 24 * GB, "torch", others=("mlx",))
    plan = placed([*macs(24), torch_first], GroupWish(2, backend="ring"))
    assert (shape(plan), plan.engines) == ([("ab", 48)], ("mlx",))
    assert shape(placed([*macs(24), torch_first], RING))[0][0] != "ab", "but nobody is made to change engines unasked"


# how much


def test_a_group_counts_for_its_smallest_member_times_its_size() -> None:
    group = joined(macs(128, 48), "ring", {})
    assert group.share_bytes == 96 * GB and group.usable_bytes == 48 * GB and group.size == 2


def test_a_rank_holds_its_share_of_the_layers_and_all_of_embedding_and_head() -> None:
    half = sharded(LLAMA_8B, 2)
    assert half.layer_bytes[0] * 2 in (LLAMA_8B.layer_bytes[0], LLAMA_8B.layer_bytes[0] + 1)
    assert (half.embed_bytes, half.head_bytes) == (LLAMA_8B.embed_bytes, LLAMA_8B.head_bytes)
    assert half.kv_bytes_per_token * 2 == LLAMA_8B.kv_bytes_per_token
    latent = sharded(replace(LLAMA_8B, architecture="deepseek_v3"), 2)
    assert latent.kv_bytes_per_token == LLAMA_8B.kv_bytes_per_token, "one latent for all heads"
    assert sharded(LLAMA_8B, 1) is LLAMA_8B


def test_layers_follow_what_the_groups_count_for() -> None:
    # the group counts for 2 x 16 = 32 GB, the single peer for 16: two thirds of 48 layers
    plan = placed(macs(16, 16, 16), GroupWish(2, backend="ring"), min_peers=3)
    assert shape(plan) == [("ab", 32), ("c", 16)]
    reserve = stage_bytes(sharded(FLAT, 2), 0, 32, plan.pool_tokens)
    assert plan.stages[0].reserve_bytes == reserve <= 16 * GB
    assert plan.member_ids == ("a", "b", "c") and plan.peer_ids == ("a", "c")


def test_two_groups_share_a_ring() -> None:
    wish = GroupWish(members=(("a", "b"), ("c", "d")), backend="ring")
    assert shape(placed(macs(24, 24, 12, 12), wish)) == [("ab", 32), ("cd", 16)]


def test_a_group_and_a_peer_of_another_engine_share_a_ring() -> None:
    peers = [*macs(16, 16), Candidate("t", 16 * GB, "torch")]
    assert shape(placed(peers, GroupWish(2, backend="ring"), min_peers=3)) == [("ab", 32), ("t", 16)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(6, 40), min_size=2, max_size=6), st.integers(2, 4), st.integers(1, 6))
def test_whatever_the_memories_no_rank_takes_more_than_it_has_and_every_layer_is_held_once(
    gb: list[int], size: int, min_peers: int
) -> None:
    try:
        plan = placed(macs(*gb), GroupWish(size, backend="ring"), min_peers=min(min_peers, len(gb)))
    except PlacementError:
        return
    usable = {c.peer_id: c.usable_bytes for c in macs(*gb)}
    assert all(stage.reserve_bytes <= usable[peer] for stage in plan.stages for peer in stage.peers)
    assert len(set(plan.member_ids)) == len(plan.member_ids) >= min(min_peers, len(gb))
    assert any(group.size == size for group in groups_of(plan))
    assert sum(len(stage.shard) for stage in plan.stages) == FLAT.num_layers


# when


def test_nobody_is_joined_for_a_model_that_one_peer_holds() -> None:
    assert shape(placed(macs(64, 64), facts=cabled("ab"))) == [("a", 48)]


def test_macs_with_a_cable_are_a_group_and_others_a_pipeline() -> None:
    assert shape(placed(macs(24, 24), facts=cabled("ab"))) == [("ab", 48)]
    assert shape(placed(macs(24, 24))) == [("a", 24), ("b", 24)]
    assert shape(placed(macs(24, 24), RING)) == [("ab", 48)], "over TCP if somebody says so"
    assert shape(placed(macs(24, 24), GroupWish(1), cabled("ab"))) == [("a", 24), ("b", 24)]


def test_a_group_is_not_worth_another_peer() -> None:
    # a and c hold it as two stages; the cable is between b and c, which are too small for it
    plan = placed(macs(40, 6, 6), facts=cabled("bc"))
    assert shape(plan) == [("a", 48)]
    plan = placed(macs(30, 6, 14), facts=cabled("bc"))
    assert len(plan.member_ids) == 2 and not groups_of(plan)


def test_a_group_that_was_asked_for_is_made_though_one_peer_would_do() -> None:
    assert shape(placed(macs(64, 64), GroupWish(2, backend="ring"))) == [("ab", 48)]
    assert shape(placed(macs(64, 8, 64), GroupWish(2, backend="ring"))) == [("ac", 48)], "those with the most memory"


def test_a_group_that_does_not_hold_the_model_alone_gets_help() -> None:
    assert shape(placed(macs(16, 16, 30), GroupWish(members=(("a", "b"),), backend="ring")))[0][0] == "ab"
    with pytest.raises(PlacementError, match=r"a\+b 16.00 GB"):
        placed(macs(8, 8), GroupWish(2, backend="ring"))


@pytest.mark.parametrize("policy", ["latency", "throughput"])
def test_every_policy_places_groups(policy: str) -> None:
    measured = [replace(mac, s_per_gb=0.01) for mac in macs(24, 24, 24)]
    plan = placed(measured, GroupWish(2, backend="ring"), min_peers=3, policy=policy)
    assert sorted(len(stage.peers) for stage in plan.stages) == [1, 2]


def test_after_failures_the_same_peers_are_stages_one_by_one() -> None:
    plan = placed(macs(24, 24), GroupWish(2, backend="ring"))
    wish, min_peers = as_pipeline(GroupWish(2, backend="ring"), plan, 1)
    assert shape(placed(macs(24, 24), wish, min_peers=min_peers)) == [("a", 24), ("b", 24)]


def test_pins_may_name_groups_in_any_place() -> None:
    pins = [Pin("c", 0, 10), Pin("a", 10, 48, group=("a", "b"), group_backend="ring")]
    grouped, by_leader = pinned_groups(macs(16, 16, 16), pins, ANY)
    plan = solve_pinned(FLAT, grouped, by_leader, context_limit=2048, instance_id="i", ballot=Ballot(1, "c"))
    assert shape(plan) == [("c", 10), ("ab", 38)]
    with pytest.raises(PlacementError, match="no RDMA link is up"):
        pinned_groups(macs(16, 16), [Pin("a", 0, 48, group=("a", "b"))], ANY)


def test_a_ring_with_a_group_is_placed_anew_when_it_breaks() -> None:
    plan = placed(macs(16, 16, 16), GroupWish(2, backend="ring"), min_peers=3)
    with pytest.raises(PlacementError, match="placed again"):
        recover(
            FLAT, plan, holding={}, usable_bytes={"a": 16 * GB, "c": 16 * GB}, spares=[], ballot=Ballot(2, "a"),
            around=Surroundings(),
        )  # fmt: skip
