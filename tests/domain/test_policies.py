"""Policies, pins, legal cuts per engine and typed refusals; the figures are those of worked examples."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.fitting import fastest_layers, latency, throughput
from exo_mesh.domain.footprint import POOL_TOKENS, stage_bytes
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.pinning import PINNED, Pin, solve_pinned
from exo_mesh.domain.placement import solve
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.ring_candidates import NOTHING_KNOWN, Candidate, Surroundings
from exo_mesh.errors import InputError, PlacementError
from tests.domain.test_placement import GB, LLAMA_8B, place

FLAT = replace(
    LLAMA_8B, num_layers=48, layer_bytes=(800_000_000,) * 48, embed_bytes=0, head_bytes=0, kv_bytes_per_token=1,
    legal_cuts=tuple(range(48)),
)  # fmt: skip
"""48 equal layers, 38.4 GB; a peer of s_per_gb = t / 0.8 takes t per layer."""


def measured(*peers: tuple[float, float]) -> list[Candidate]:
    """(usable GB, seconds per layer of FLAT)."""
    return [Candidate(f"p{i}", int(gb * GB), "mlx", s / 0.8) for i, (gb, s) in enumerate(peers)]


def counts(plan: Plan) -> dict[str, int]:
    return {stage.peer_id: len(stage.shard) for stage in plan.stages}


def solved(candidates: list[Candidate], policy: str, around: Surroundings = NOTHING_KNOWN, least: int = 1) -> Plan:
    return solve(
        FLAT, candidates, policy=policy, min_peers=least, context_limit=2048, instance_id="i", ballot=Ballot(1, "p0"),
        around=around,
    )  # fmt: skip


def test_latency_leaves_slow_peers_out_and_throughput_levels_the_stages() -> None:
    big_and_quick, small = (96, 0.24), (12, 1.6)
    peers = measured(big_and_quick, small, small)
    assert counts(solved(peers, "latency")) == {"p0": 48}
    # 38 x 0.24 = 9.12 and 5 x 1.6 = 8.0; a sixth layer on a slow one would take 9.6
    assert counts(solved(peers, "throughput")) == {"p0": 38, "p1": 5, "p2": 5}


def test_latency_fills_the_fastest_first_when_one_is_not_enough() -> None:
    peers = measured((25, 1.0), (17, 1.6), (17, 1.6))
    plan = solved(peers, "latency")
    assert counts(plan)["p0"] == max(n for n in range(49) if stage_bytes(FLAT, 0, n, POOL_TOKENS) <= 25 * GB)


def test_a_slow_link_is_worth_avoiding() -> None:
    peers = measured((25, 1.0), (25, 1.0), (25, 1.0))
    slow = {("p0", "p1"): 5.0, ("p1", "p2"): 0.001, ("p0", "p2"): 0.001}
    assert set(counts(solved(peers, "latency", Surroundings(hop_s=slow)))) in ({"p0", "p2"}, {"p1", "p2"})


@pytest.mark.parametrize("policy", ["latency", "throughput"])
def test_until_all_are_measured_policies_go_by_memory(policy: str) -> None:
    peers = [*measured((30, 1.0), (30, 9.0)), Candidate("p2", 30 * GB, "mlx")]
    unmeasured = [replace(peer, s_per_gb=None) for peer in peers]
    assert counts(solved(peers, policy)) == counts(solved(unmeasured, policy))


def test_a_large_head_counts_as_layers_and_an_embedding_table_as_none() -> None:
    card = replace(FLAT, num_layers=8, layer_bytes=(100 * 10**6,) * 8, embed_bytes=400 * 10**6, head_bytes=400 * 10**6,
                   legal_cuts=tuple(range(8)))  # fmt: skip
    assert card.step_bytes(0, 6) == card.step_bytes(6, 8) == 600 * 10**6
    for s_per_gb in (1.0, None):
        peers = [Candidate(f"p{i}", 8 * GB, "mlx", s_per_gb) for i in range(2)]
        plan = solve(card, peers, policy="throughput", min_peers=2, context_limit=2048, instance_id="i",
                     ballot=Ballot(1, "p0"))  # fmt: skip
        assert counts(plan) == {"p0": 6, "p1": 2}


@settings(max_examples=60, deadline=None)
@given(
    layer_mb=st.lists(st.integers(50, 900), min_size=3, max_size=9),
    head_mb=st.integers(0, 900),
    peers=st.lists(st.tuples(st.integers(600, 3000), st.integers(1, 50)), min_size=1, max_size=3),
)
def test_the_quickest_cut_is_found(layer_mb: list[int], head_mb: int, peers: list[tuple[int, int]]) -> None:
    n = len(layer_mb)
    card = replace(
        FLAT, num_layers=n, layer_bytes=tuple(mb * 10**6 for mb in layer_mb), legal_cuts=tuple(range(1, n)),
        head_bytes=head_mb * 10**6,
    )  # fmt: skip
    usable, speed = [mb * 10**6 for mb, _ in peers], [float(s) for _, s in peers]
    for goal in (latency, throughput):
        found = fastest_layers(card, [card] * len(peers), usable, speed, 64, goal)
        paces = [_pace(card, edges, usable, speed, goal is latency) for edges in _all_cuts(n, len(peers))]
        fitting = [pace for pace in paces if pace is not None]
        assert (found is None) == (not fitting)
        if found is not None:
            assert goal(found[0])[0] == pytest.approx(min(fitting))


def _all_cuts(layers: int, stages: int) -> list[list[int]]:
    return [[0, *inner, layers] for inner in combinations(range(1, layers), stages - 1)]


def _pace(card: ModelCard, edges: list[int], usable: list[int], speed: list[float], in_turn: bool) -> float | None:
    times = []
    for start, stop, size, s_per_gb in zip(edges, edges[1:], usable, speed, strict=False):
        if stage_bytes(card, start, stop, 64) > size:
            return None
        times.append(s_per_gb * card.step_bytes(start, stop) / 1e9)
    return sum(times) if in_turn else max(times)


def test_cuts_are_those_of_the_engine() -> None:
    peers = [Candidate(f"p{i}", 9 * GB, "mlx") for i in range(3)]
    plan = solve(
        LLAMA_8B, peers, policy="memory", min_peers=3, context_limit=2048, instance_id="i", ballot=Ballot(1, "p0"),
        around=Surroundings(cards={"mlx": replace(LLAMA_8B, legal_cuts=(8, 24))}),
    )  # fmt: skip
    assert [stage.shard.start for stage in plan.stages] == [0, 8, 24]


def pinned(*pins: Pin, candidates: list[Candidate] | None = None, context_limit: int = 2048) -> Plan:
    peers = candidates or [Candidate(f"p{i}", 12 * GB, "mlx") for i in range(3)]
    return solve_pinned(
        LLAMA_8B, peers, pins, context_limit=context_limit, instance_id="i", ballot=Ballot(1, "p9"),
        around=Surroundings(cards={"mlx": replace(LLAMA_8B, legal_cuts=(4, 8, 16, 24))}),
    )  # fmt: skip


def test_pins_are_taken_as_they_are_in_the_order_of_the_layers() -> None:
    plan = pinned(Pin("p0", 16, 32), Pin("p2", 0, 16))
    assert [(s.peer_id, s.shard.start, s.shard.stop) for s in plan.stages] == [("p2", 0, 16), ("p0", 16, 32)]
    assert plan.inputs.policy == PINNED and plan.pool_tokens == POOL_TOKENS


@pytest.mark.parametrize(
    ("pins", "problem"),
    [
        ((Pin("p0", 0, 16),), "layers 16 to 31 are given to no peer"),
        ((Pin("p0", 0, 16), Pin("p1", 15, 32)), "but layer 16 must come next"),
        ((Pin("p0", 4, 32),), "but layer 0 must come next"),
        ((Pin("p0", 0, 33),), "p0 is given layers 0 to 32, but the last layer is 31"),
        ((Pin("p0", 0, 16), Pin("p0", 16, 32)), "given layers twice"),
        ((Pin("nobody", 0, 32),), "cannot take part"),
        ((Pin("p0", 0, 17), Pin("p1", 17, 32)), "no stage may begin at layer 17; legal are 0, 4, 8, 16, 24"),
        ((), "layers 0 to 31 are given to no peer"),
    ],
)
def test_pins_that_make_no_ring_are_refused(pins: tuple[Pin, ...], problem: str) -> None:
    with pytest.raises(InputError, match=problem) as refused:
        pinned(*pins)
    assert refused.value.param == "pins"


def test_a_preview_that_is_out_of_date_is_refused() -> None:
    half = stage_bytes(LLAMA_8B, 0, 16, POOL_TOKENS)
    assert pinned(Pin("p0", 0, 16, "mlx", half), Pin("p1", 16, 32)).stages[0].reserve_bytes == half
    with pytest.raises(PlacementError, match="memory has changed since the preview") as refused:
        pinned(Pin("p0", 0, 16, "mlx", half - 1), Pin("p1", 16, 32))
    assert refused.value.reason == "outdated"


def test_a_preview_with_a_pool_that_is_not_cheap_any_more_still_holds() -> None:
    larger = stage_bytes(LLAMA_8B, 0, 16, 4 * POOL_TOKENS)
    assert pinned(Pin("p0", 0, 16), Pin("p1", 16, 32)).pool_tokens == POOL_TOKENS
    assert pinned(Pin("p0", 0, 16, "mlx", larger), Pin("p1", 16, 32)).pool_tokens == 4 * POOL_TOKENS


def test_pins_that_do_not_fit_are_refused_with_the_numbers_of_the_peer() -> None:
    with pytest.raises(PlacementError, match=r"p0 needs 12\.59 GB for layers 0 to 23, usable are 12\.00 GB") as refused:
        pinned(Pin("p0", 0, 24), Pin("p1", 24, 32), context_limit=8192)
    assert refused.value.have == (("p0", 12 * GB), ("p1", 12 * GB))


def test_a_pinned_ring_is_of_one_engine_if_the_node_says_so() -> None:
    mixed = [Candidate("p0", 20 * GB, "mlx"), Candidate("p1", 20 * GB, "torch")]
    pins = (Pin("p0", 0, 16), Pin("p1", 16, 32))
    assert pinned(*pins, candidates=mixed).engines == ("mlx", "torch")
    with pytest.raises(InputError, match="p0 mlx, p1 torch"):
        solve_pinned(
            LLAMA_8B, mixed, pins, context_limit=2048, instance_id="i", ballot=Ballot(1, "p9"), mixing="never"
        )  # fmt: skip


def test_a_refusal_carries_its_numbers_for_programs() -> None:
    with pytest.raises(PlacementError) as refused:
        place(LLAMA_8B, 4, 3, context_limit=512)
    details = refused.value.details
    assert details["reason"] == "memory" and details["need_bytes"] == stage_bytes(LLAMA_8B, 0, 32, 512)
    assert details["have"] == [{"peer": "p0", "usable_bytes": 4 * GB}, {"peer": "p1", "usable_bytes": 3 * GB}]
    assert "Free at least" in str(details["remedy"])


def test_the_plan_carries_its_kv_pool_and_it_is_in_the_digest() -> None:
    roomy, tight = place(LLAMA_8B, 64, context_limit=1024), place(LLAMA_8B, 16.6, context_limit=1024)
    assert (roomy.pool_tokens, tight.pool_tokens) == (2 * POOL_TOKENS, 1024)
    assert replace(roomy, pool_tokens=1024).digest != roomy.digest
