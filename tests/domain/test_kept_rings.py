"""Plans keep the machines and cuts for which KV or weights are on disk, whoever makes them, unless memory forbids."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.grouping import joined
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.placement import POLICIES, solve, solve_with_most_context
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.ring_candidates import Candidate, Surroundings
from exo_mesh.domain.shard import KeptLayers
from exo_mesh.errors import PlacementError

GB = 10**9
LAYERS = 12
CARD = ModelCard(
    name="m",
    architecture="llama",
    num_layers=LAYERS,
    hidden_size=64,
    vocab_size=100,
    context_length=4096,
    layer_bytes=(GB,) * LAYERS,
    embed_bytes=GB // 10,
    head_bytes=GB // 10,
    tied=False,
    kv_bytes_per_token=64,
    dtype="bfloat16",
    eos_ids=(2,),
    legal_cuts=tuple(range(LAYERS)),
    digest="d" * 64,
)
PEERS = ("a", "b", "c")
Places = Sequence[tuple[str, int, int]]


def kv(places: Places, tokens: int = 2048, **fields: Any) -> dict[str, tuple[KeptLayers, ...]]:
    found: dict[str, tuple[KeptLayers, ...]] = {}
    for peer, start, stop in places:
        found[peer] = (*found.get(peer, ()), KeptLayers("mlx", start, stop, tokens, **fields))
    return found


def both(*parts: Mapping[str, tuple[KeptLayers, ...]]) -> dict[str, tuple[KeptLayers, ...]]:
    peers = {peer for part in parts for peer in part}
    return {peer: tuple(itertools.chain(*(part.get(peer, ()) for part in parts))) for peer in peers}


def even(*sizes_gb: float, **fields: Any) -> list[Candidate]:
    return [Candidate(peer, int(size * GB), "mlx", **fields) for peer, size in zip("abcdefgh", sizes_gb, strict=False)]


def place(
    candidates: Sequence[Candidate], on_disk: Mapping[str, tuple[KeptLayers, ...]], proposer: str = "a", *,
    policy: str = "memory", min_peers: int = 1, card: ModelCard = CARD, **around: Any,
) -> Plan:  # fmt: skip
    return solve(
        card,
        candidates,
        policy=policy,
        min_peers=min_peers,
        context_limit=2048,
        instance_id="i",
        ballot=Ballot(1, proposer),
        around=Surroundings(on_disk=on_disk, **around),
    )


def ring(plan: Plan) -> list[tuple[str, int, int]]:
    return [(stage.peer_id, stage.shard.start, stage.shard.stop) for stage in plan.stages]


OLD = [("c", 0, 3), ("a", 3, 8), ("b", 8, 12)]
"""No order that a plan without disks would choose."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("proposer", [*PEERS, "someone else"])
def test_the_ring_that_has_its_kv_on_disk_is_kept_whoever_asks(policy: str, proposer: str) -> None:
    assert ring(place(even(6, 6, 6), kv(OLD), proposer, policy=policy, min_peers=3)) == OLD


@given(
    sizes=st.lists(st.integers(5, 20), min_size=2, max_size=5),
    proposer=st.sampled_from("abcde"),
    policy=st.sampled_from(POLICIES),
    min_peers=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_ring_that_was_made_is_made_again_by_every_peer_with_other_memory(
    sizes: list[int], proposer: str, policy: str, min_peers: int, data: st.DataObject
) -> None:
    candidates = even(*sizes)
    try:
        before = place(candidates, {}, proposer, policy=policy, min_peers=min_peers)
    except PlacementError:
        return
    assert place(candidates, {}, proposer, policy=policy, min_peers=min_peers) == before
    kept = kv(ring(before))
    for other in {data.draw(st.sampled_from("abcde")), *before.peer_ids}:
        drift = [replace(one, usable_bytes=one.usable_bytes + data.draw(st.integers(0, GB))) for one in candidates]
        again = place(drift, kept, other, policy=policy, min_peers=len(before.stages))
        plain = place(drift, {}, other, policy=policy, min_peers=len(before.stages))
        if len(plain.stages) == len(before.stages):
            assert ring(again) == ring(before)
        assert again.inputs.on_disk == tuple(sorted(kept.items()))


PIECES = st.lists(st.tuples(st.sampled_from(PEERS), st.integers(0, 11), st.integers(1, 12)), max_size=8)


@given(st.permutations(PEERS), st.sampled_from(PEERS), PIECES)
@settings(max_examples=60, deadline=None)
def test_kv_of_no_whole_ring_changes_nothing(order: list[str], proposer: str, pieces: Places) -> None:
    kept = kv([(peer, start, stop) for peer, start, stop in pieces if start < stop and stop < LAYERS])  # no last stage
    candidates = sorted(even(6, 6, 6), key=lambda one: order.index(one.peer_id))
    assert ring(place(candidates, kept, proposer)) == ring(place(candidates, {}, proposer))


def test_between_two_rings_on_disk_the_one_with_more_kv_is_kept_and_a_tie_does_not_depend_on_who_asks() -> None:
    other = [("b", 0, 4), ("c", 4, 8), ("a", 8, 12)]
    three = even(6, 6, 6)
    assert ring(place(three, both(kv(OLD, 1024), kv(other, 4096)))) == other
    found = {tuple(ring(place(three, both(kv(OLD), kv(other)), proposer))) for proposer in PEERS}
    assert len(found) == 1 and list(found.pop()) in (OLD, other)


X, Y = [("a", 0, 6), ("d", 6, 12)], [("c", 0, 6), ("b", 6, 12)]
"""Two rings with equal cuts."""


@pytest.mark.parametrize("proposer", ["a", "b", "c", "d", "someone else"])
def test_stages_of_two_rings_with_equal_cuts_are_not_mixed(proposer: str) -> None:
    four = even(7, 7, 7, 7)
    kept = both(kv(X, keys=(1, 2, 3)), kv(Y, keys=(4, 5, 6)))
    assert ring(place(four, kept, proposer)) in (X, Y)
    more = both(kv(X[:1], 8192, keys=(1, 2)), kv(X[1:], keys=(1, 2)), kv(Y[:1], keys=(4,)), kv(Y[1:], 8192, keys=(4,)))
    assert ring(place(four, more, proposer)) in (X, Y), "a and b have most"
    shared = both(kv(X, 4096, keys=(1, 2, 3, 9)), kv(Y, 4096, keys=(4, 5, 6, 9)))
    assert ring(place(four, shared, proposer)) in (X, Y), "one prompt of four is in all files"


def test_a_ring_counts_with_the_most_kv_that_fits_together() -> None:
    halves = both(kv(X[:1], 8192, activation_dtype="float32"), kv(X[1:], 64, activation_dtype="float32"), kv(X, 4096))
    assert ring(place(even(7, 7, 7, 7), both(halves, kv(Y, 2048)), "c")) == X


def test_every_stage_of_a_kept_ring_has_a_key_of_all_others() -> None:
    thirds = [("a", 0, 4, (1, 2)), ("b", 4, 8, (2, 3)), ("c", 8, 12, (1, 3))]
    pairs = both(*(kv([tuple(place)], keys=keys) for *place, keys in thirds))  # type: ignore[list-item]
    assert ring(place(even(6, 6, 6), pairs, "c")) == ring(place(even(6, 6, 6), {}, "c")), "any two have one"


def test_after_machines_changed_the_ring_that_wrote_the_last_files_is_kept() -> None:
    new = [("a", 0, 6), ("b", 6, 12)]
    kept = both(kv(X[1:], 8192, keys=(1, 2, 3, 4)), kv(new, keys=(5, 6, 7, 8)))
    assert {tuple(ring(place(even(7, 7, 7, 7), kept, proposer))) for proposer in "abcd"} == {tuple(new)}
    assert ring(place(even(7, 0.1, 7, 7), kept, "c")) == ring(place(even(7, 0.1, 7, 7), {}, "c")), "b is too small now"


def test_kv_at_peers_that_say_no_keys_is_joined_by_its_cuts() -> None:
    assert ring(place(even(6, 6, 6), both(kv(OLD[:1]), kv(OLD[1:], keys=(1,))))) == OLD


def test_memory_forbids_a_kept_cut_and_a_longer_ring_is_not_kept() -> None:
    assert ring(place(even(4, 6, 6), kv(OLD))) != OLD, "five layers do not fit"
    assert len(place(even(20, 6, 6), kv(OLD)).stages) == 1, "one machine holds the model now"
    assert ring(place(even(7, 7), kv(OLD))) == [("a", 0, 6), ("b", 6, 12)], "a machine is missing"


def test_a_little_more_free_memory_does_not_make_the_ring_shorter() -> None:
    assert len(place(even(6.8, 6.8, 6.8), {}).stages) == 2
    assert ring(place(even(6.8, 6.8, 6.8), kv(OLD))) == OLD, "two would hold it, but only just"
    assert len(place(even(8, 8, 8), kv(OLD)).stages) == 2


def test_a_whole_model_goes_to_the_machine_that_has_its_kv() -> None:
    assert ring(place(even(20, 20, 20), kv([("b", 0, 12)]), "c")) == [("b", 0, 12)]


def test_kv_of_another_engine_rank_or_kind_of_ring_is_of_no_use() -> None:
    plain = ring(place(even(6, 6, 6), {}))
    torch = {peer: tuple(replace(one, engine="torch") for one in kept) for peer, kept in kv(OLD).items()}
    mixed = {**kv(OLD), **kv(OLD[:1], activation_dtype="float32")}
    for kept in (torch, mixed, kv(OLD, rank=1, size=2)):
        assert ring(place(even(6, 6, 6), kept)) == plain
    assert ring(place(even(6, 6, 6), kv(OLD), even=True)) == plain, "the cuts are not even"
    cut = replace(CARD, legal_cuts=(4, 8))
    assert ring(place(even(6, 6, 6), kv(OLD), card=cut)) == plain, "the cuts are not legal any more"


def test_with_measured_speeds_a_kept_ring_may_be_a_little_slower_but_not_much() -> None:
    kept = kv([("a", 0, 7), ("b", 7, 12)])

    def placed(slow: float) -> list[tuple[str, int, int]]:
        two = [Candidate("a", 9 * GB, "mlx", slow), Candidate("b", 9 * GB, "mlx", 0.01)]
        return ring(place(two, kept, policy="throughput", min_peers=2))

    assert placed(0.01) == [("a", 0, 7), ("b", 7, 12)]
    assert placed(0.02) != [("a", 0, 7), ("b", 7, 12)]


def test_a_tensor_group_is_kept_if_each_rank_has_its_share() -> None:
    members = even(14, 14)
    groups = [
        joined([members[0], members[1]], "ring", {}),
        joined([replace(members[0], peer_id="c"), replace(members[1], peer_id="d")], "ring", {}),
    ]
    shares = {"c": 0, "d": 1}
    whole = {peer: (KeptLayers("mlx", 0, 12, 512, "", rank, 2),) for peer, rank in shares.items()}
    assert place(groups, whole, "a").member_ids == ("c", "d")
    assert place(groups, {**whole, "d": ()}, "a").member_ids == ("a", "b")
    others = {peer: (replace(one, keys=(rank,)),) for rank, (peer, (one,)) in enumerate(whole.items())}
    assert place(groups, others, "a").member_ids == ("a", "b"), "the shares are of two groups"
    same = {peer: (replace(one, keys=(1, 2 + rank)),) for rank, (peer, (one,)) in enumerate(whole.items())}
    assert place(groups, same, "a").member_ids == ("c", "d")


def test_machines_that_have_fetched_layers_get_them_again() -> None:
    weights = {peer: (KeptLayers("", start, stop),) for peer, start, stop in OLD}
    without = even(6, 6, 6, has_files=False)
    assert {tuple(ring(place(without, weights, proposer))) for proposer in PEERS} == {tuple(OLD)}
    assert ring(place(even(6, 6, 6), weights)) == ring(place(even(6, 6, 6), {})), "all have all files"
    partly = [replace(without[0], has_files=True), *without[1:]]
    assert ring(place(partly, {peer: weights[peer] for peer in ("b", "c")}, "b")) == OLD, "a can take any layers"


def test_the_longest_context_is_kept_too() -> None:
    plans = [
        solve_with_most_context(
            CARD, even(6, 6, 6), policy="memory", min_peers=3, instance_id="i", ballot=Ballot(1, "b"),
            around=Surroundings(on_disk=kept),
        )
        for kept in ({}, kv(OLD))
    ]  # fmt: skip
    assert plans[0].context_limit == plans[1].context_limit and ring(plans[1]) == OLD


def test_the_search_is_bounded_whatever_peers_claim() -> None:
    peers = [Candidate(f"p{index:02}", 2 * GB, "mlx") for index in range(30)]
    claims = tuple(KeptLayers("mlx", start, start + 1, 512) for start in range(LAYERS))
    begin = time.process_time()
    plan = place(peers, {one.peer_id: claims for one in peers}, "p07", min_peers=LAYERS)
    assert len(plan.stages) == LAYERS and time.process_time() - begin < 20
