"""What a ring becomes when stages are lost: the fewest bytes loaded, and never a layer without a holder."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.footprint import stage_bytes
from exo_mesh.domain.placement import solve
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.recovery import Recovery, recover
from exo_mesh.domain.ring_candidates import NOTHING_KNOWN, Candidate, Surroundings
from exo_mesh.errors import PlacementError
from tests.domain.test_placement import GB, LLAMA_8B


def ring_of(*sizes_gb: float) -> Plan:
    candidates = [Candidate(f"p{rank}", int(size * GB), "mlx") for rank, size in enumerate(sizes_gb)]
    return solve(
        LLAMA_8B, candidates, policy="memory", min_peers=len(sizes_gb), context_limit=2048, instance_id="i-1",
        ballot=Ballot(3, "p0"),
    )  # fmt: skip


def after_loss(
    old: Plan, *, dead: tuple[str, ...] = (), crashed: tuple[str, ...] = (), spares: tuple[Candidate, ...] = (),
    around: Surroundings = NOTHING_KNOWN,
) -> Recovery:  # fmt: skip
    """crashed: only the runner died; the peer lives."""
    alive = [stage for stage in old.stages if stage.peer_id not in dead]
    usable = dict(old.inputs.candidates)
    return recover(
        LLAMA_8B,
        old,
        holding={s.peer_id: range(s.shard.start, s.shard.stop) for s in alive if s.peer_id not in crashed},
        usable_bytes={stage.peer_id: usable[stage.peer_id] for stage in alive},
        spares=spares,
        ballot=Ballot(4, "p0"),
        around=around,
    )


def layers(plan: Plan) -> list[tuple[str, int, int]]:
    return [(stage.peer_id, stage.shard.start, stage.shard.stop) for stage in plan.stages]


def test_a_process_that_died_is_started_again_in_its_place() -> None:
    old = ring_of(8, 8, 8)
    spare = Candidate("spare", 64 * GB, "mlx")
    found = after_loss(old, crashed=("p1",), spares=(spare,))
    assert layers(found.plan) == layers(old) and found.plan.ballot == Ballot(4, "p0")
    shard = old.stages[1].shard
    assert found.load_bytes == {"p0": 0, "p1": LLAMA_8B.shard_bytes(shard.start, shard.stop), "p2": 0}


def test_a_spare_takes_the_place_of_a_dead_peer_and_all_others_keep_their_weights() -> None:
    old = ring_of(8, 8, 8)
    spares = (Candidate("small", 2 * GB, "mlx"), Candidate("roomy", 9 * GB, "mlx"), Candidate("other", 99 * GB, "x"))
    found = after_loss(old, dead=("p1",), spares=spares)
    start, stop = old.stages[1].shard.start, old.stages[1].shard.stop
    assert layers(found.plan)[1] == ("roomy", start, stop) and len(found.plan.stages) == 3
    assert {peer for peer, load in found.load_bytes.items() if load} == {"roomy"}


def test_a_peer_that_can_give_nothing_any_more_is_left_out() -> None:
    old = ring_of(8, 8, 8)
    kept = {stage.peer_id: range(stage.shard.start, stage.shard.stop) for stage in old.stages if stage.peer_id != "p1"}
    found = recover(
        LLAMA_8B, old, holding=kept, usable_bytes={"p0": 8 * GB, "p1": 0, "p2": 8 * GB},
        spares=(Candidate("spare", 9 * GB, "mlx"),), ballot=Ballot(4, "p0"),
    )  # fmt: skip
    assert [peer for peer, _, _ in layers(found.plan)] == ["p0", "spare", "p2"]
    assert {peer for peer, load in found.load_bytes.items() if load} == {"spare"}


def test_one_neighbour_absorbs_the_layers_if_it_can_alone() -> None:
    old = ring_of(16, 12, 12)
    found = after_loss(old, dead=("p1",))
    loading = {peer: load for peer, load in found.load_bytes.items() if load}
    assert len(loading) == 1, "the other one keeps its range and its weights"
    (peer,) = loading
    stage = next(stage for stage in found.plan.stages if stage.peer_id == peer)
    assert loading[peer] == LLAMA_8B.shard_bytes(stage.shard.start, stage.shard.stop)


def test_neighbours_share_what_no_one_of_them_can_hold() -> None:
    old = ring_of(8.9, 8.9, 8.9)
    found = after_loss(old, dead=("p1",))
    assert [peer for peer, _, _ in layers(found.plan)] == ["p0", "p2"] and all(found.load_bytes.values())


def test_distant_stages_are_left_alone() -> None:
    old = ring_of(12, 6, 6, 6, 6)
    found = after_loss(old, dead=("p4",))
    untouched = set(layers(old)) & set(layers(found.plan))
    assert {peer for peer, load in found.load_bytes.items() if not load} == {peer for peer, _, _ in untouched}
    assert len(untouched) >= 2


def test_two_dead_peers_and_one_spare() -> None:
    old = ring_of(12, 8, 8, 8)
    found = after_loss(old, dead=("p1", "p3"), spares=(Candidate("spare", 10 * GB, "mlx"),))
    assert sum(stop - start for _, start, stop in layers(found.plan)) == 32


def test_new_boundaries_are_legal_cuts() -> None:
    old = ring_of(12, 12, 12)
    cuts = tuple({stage.shard.start for stage in old.stages} | {0, 4, 20})
    found = after_loss(old, dead=("p1",), around=Surroundings(cards={"mlx": replace(LLAMA_8B, legal_cuts=cuts)}))
    assert {start for _, start, _ in layers(found.plan)} <= set(cuts)


def test_what_those_left_cannot_hold_is_refused_with_the_numbers() -> None:
    old = ring_of(6, 6, 6, 6)
    with pytest.raises(PlacementError, match=r"p0 6.00 GB") as refused:
        after_loss(old, dead=("p1", "p2"))
    details = refused.value.details
    assert details["reason"] == "memory" and refused.value.need_bytes is not None
    assert refused.value.need_bytes > sum(size for _, size in refused.value.have)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(4, 24), min_size=2, max_size=6),
    lost=st.sets(st.integers(0, 5), min_size=1, max_size=3),
    spares=st.lists(st.integers(2, 24), max_size=3),
)
def test_every_layer_is_held_once_everything_fits_and_no_simpler_way_loads_less(
    sizes: list[int], lost: set[int], spares: list[int]
) -> None:
    try:
        old = ring_of(*sizes)
    except PlacementError:
        return
    dead = tuple(f"p{rank}" for rank in lost if rank < len(sizes))
    extra = tuple(Candidate(f"s{rank}", size * GB, "mlx") for rank, size in enumerate(spares))
    try:
        found = after_loss(old, dead=dead, spares=extra)
    except PlacementError:
        return
    usable = {**dict(old.inputs.candidates), **{spare.peer_id: spare.usable_bytes for spare in extra}}
    assert all(a.shard.stop == b.shard.start for a, b in pairwise(found.plan.stages))
    before = {stage.peer_id: stage.shard for stage in old.stages}
    for stage in found.plan.stages:
        shard, pool = stage.shard, found.plan.kv_tokens
        assert stage.reserve_bytes == stage_bytes(LLAMA_8B, shard.start, shard.stop, pool)
        assert stage.reserve_bytes <= usable[stage.peer_id] and stage.peer_id not in dead
        same = before.get(stage.peer_id) == stage.shard
        assert (found.load_bytes[stage.peer_id] == 0) == same
    wanted = sum(LLAMA_8B.shard_bytes(before[peer].start, before[peer].stop) for peer in dead)
    lost_bytes = sum(stage.reserve_bytes for stage in old.stages if stage.peer_id in dead)
    if len(dead) == 1 and any(spare.usable_bytes >= lost_bytes for spare in extra):
        assert found.total_load_bytes <= wanted


def test_a_ring_of_one_engine_stays_so() -> None:
    old = ring_of(12, 12)
    torch = replace(Candidate("t", 64 * GB, "mlx"), engine="torch")
    with pytest.raises(PlacementError):
        after_loss(old, dead=("p0", "p1"), spares=(torch,))
