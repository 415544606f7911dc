"""Who holds which layers: fewest peers, exact bytes, legal cuts, and refusals that say the numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.fitting import fit_layers
from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES, POOL_TOKENS, stage_bytes
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.placement import solve, solve_with_most_context, with_caps
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.ring_candidates import Candidate, Surroundings, by_tier
from exo_mesh.errors import PlacementError

GB = 10**9
LLAMA_8B = ModelCard(
    name="llama-8b",
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    vocab_size=128256,
    context_length=131072,
    layer_bytes=(436_000_000,) * 32,
    embed_bytes=1_050_000_000,
    head_bytes=1_050_000_000,
    tied=False,
    kv_bytes_per_token=4096,
    dtype="bfloat16",
    eos_ids=(2,),
    legal_cuts=tuple(range(32)),
    digest="d" * 64,
)


def place(
    card: ModelCard, *sizes_gb: float, proposer: str = "p0", engines: tuple[str, ...] = (), min_peers: int = 1,
    policy: str = "memory", context_limit: int = 4096,
) -> Plan:  # fmt: skip
    candidates = [
        Candidate(f"p{rank}", int(size * GB), engines[rank] if engines else "mlx") for rank, size in enumerate(sizes_gb)
    ]
    return solve(
        card,
        candidates,
        policy=policy,
        min_peers=min_peers,
        context_limit=context_limit,
        instance_id="i-1",
        ballot=Ballot(1, proposer),
    )


def ring(plan: Plan) -> list[tuple[str, int]]:
    return [(stage.peer_id, len(stage.shard)) for stage in plan.stages]


def test_a_model_that_fits_the_proposer_stays_there_even_if_others_are_bigger() -> None:
    assert ring(place(LLAMA_8B, 24, 96, 64)) == [("p0", 32)]


def test_otherwise_one_bigger_peer_beats_two() -> None:
    assert ring(place(LLAMA_8B, 8, 64, 16)) == [("p1", 32)]


def test_two_peers_share_in_proportion_to_memory() -> None:
    assert ring(place(LLAMA_8B, 8, 16, min_peers=2)) == [("p0", 11), ("p1", 21)]


def test_a_share_that_does_not_fit_goes_to_the_neighbour() -> None:
    # p0's proportional 6 layers and the embedding are over 3.5 GB; the head's 1.05 GB bind p1
    plan = place(LLAMA_8B, 3.5, 15.5)
    assert sum(size for _, size in ring(plan)) == 32 and len(plan.stages) == 2
    for stage, usable in zip(plan.stages, (3.5 * GB, 15.5 * GB), strict=True):
        assert stage.reserve_bytes <= usable


def test_min_peers_makes_that_many_stages() -> None:
    assert len(place(LLAMA_8B, 64, 64, 64, min_peers=3).stages) == 3


def test_throughput_uses_every_peer() -> None:
    assert len(place(LLAMA_8B, 64, 64, 64, policy="throughput").stages) == 3


def test_too_few_peers_are_refused_with_what_there_is() -> None:
    with pytest.raises(PlacementError, match=r"at least 3 peers, but 2 can take part: p0 \(64.00 GB\), p1"):
        place(LLAMA_8B, 64, 64, min_peers=3)


def test_a_model_that_is_too_big_is_refused_with_need_have_and_what_would_help() -> None:
    with pytest.raises(PlacementError) as refused:
        place(LLAMA_8B, 4, 3, context_limit=512)
    text = str(refused.value)
    assert "needs 16.39 GB" in text and "there is 7.00 GB" in text and "p0 4.00 GB" in text
    assert "Free at least 9.39 GB or add a peer" in text


def test_a_shorter_context_is_offered_when_it_would_fit() -> None:
    with pytest.raises(PlacementError, match="A context limit of 16384 tokens would fit"):
        place(LLAMA_8B, 19, context_limit=131072)


def test_nobody_can_run_it() -> None:
    with pytest.raises(PlacementError, match="no live peer can run llama-8b"):
        place(LLAMA_8B)


def test_a_ring_is_of_one_engine() -> None:
    plan = place(LLAMA_8B, 10, 12, 14, engines=("mlx", "torch", "mlx"))
    assert ring(plan)[0][0] == "p0" and {stage.engine for stage in plan.stages} == {"mlx"}


def test_stages_begin_at_legal_cuts_only() -> None:
    card = replace(LLAMA_8B, legal_cuts=(0, 4, 8, 12, 16, 20, 24, 28))
    plan = place(card, 9, 9, 9, min_peers=3)
    assert {stage.shard.start for stage in plan.stages} <= set(card.legal_cuts)


def test_more_stages_than_legal_pieces_are_refused() -> None:
    with pytest.raises(PlacementError):
        place(replace(LLAMA_8B, legal_cuts=(0, 16)), 64, 64, 64, min_peers=3)


def test_the_pool_shrinks_to_one_context_before_a_plan_is_refused() -> None:
    whole = stage_bytes(LLAMA_8B, 0, 32, POOL_TOKENS)
    tight = stage_bytes(LLAMA_8B, 0, 32, 1024)
    roomy, narrow = (place(LLAMA_8B, size / GB, context_limit=1024) for size in (whole, whole - 1))
    assert (roomy.stages[0].reserve_bytes, roomy.kv_tokens) == (whole, POOL_TOKENS)
    assert (narrow.stages[0].reserve_bytes, narrow.kv_tokens) == (tight, 1024), "the driver admits what was reserved"


def test_bytes_are_exact() -> None:
    card = LLAMA_8B
    expected = 32 * 436_000_000 + 2 * 1_050_000_000 + 4096 * POOL_TOKENS * 32 + ENGINE_OVERHEAD_BYTES
    assert stage_bytes(card, 0, 32, POOL_TOKENS) == expected


def test_a_refusal_caps_a_peer() -> None:
    candidates = [Candidate("p0", 5 * GB, "mlx"), Candidate("p1", 9 * GB, "mlx")]
    capped = with_caps(candidates, {"p1": 2 * GB, "p0": 50 * GB})
    assert [candidate.usable_bytes for candidate in capped] == [5 * GB, 2 * GB]


def test_equal_inputs_give_equal_digests_in_any_order() -> None:
    candidates = [Candidate(f"p{rank}", (8 + rank % 3) * GB, "mlx") for rank in range(8)]
    digests = set()
    for seed in range(5):
        random.Random(seed).shuffle(candidates)
        digests.add(
            solve(
                LLAMA_8B, candidates, policy="memory", min_peers=4, context_limit=8192, instance_id="i",
                ballot=Ballot(2, "p5"),
            ).digest
        )  # fmt: skip
    assert len(digests) == 1


def test_context_is_the_models_own_or_what_the_fewest_peers_can_hold() -> None:
    def solved(*sizes_gb: float) -> Plan:
        candidates = [Candidate(f"p{rank}", int(size * GB), "mlx") for rank, size in enumerate(sizes_gb)]
        return solve_with_most_context(
            LLAMA_8B, candidates, policy="memory", min_peers=1, instance_id="i", ballot=Ballot(1, "p0")
        )

    assert solved(64).context_limit == 131072
    assert (solved(19, 64).context_limit, len(solved(19, 64).stages)) == (131072, 1)
    assert solved(19).context_limit == 16384
    assert solved(12, 12).context_limit == 32768


@settings(max_examples=80, deadline=None)
@given(
    layer_mb=st.lists(st.integers(1, 400), min_size=1, max_size=24),
    sizes_mb=st.lists(st.integers(300, 4000), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_a_cut_is_found_whenever_there_is_one(layer_mb: list[int], sizes_mb: list[int], seed: int) -> None:
    layers = len(layer_mb)
    cuts = tuple(cut for cut in range(layers) if random.Random(seed + cut).random() < 0.7)
    card = replace(
        LLAMA_8B, num_layers=layers, layer_bytes=tuple(size * 10**6 for size in layer_mb), legal_cuts=cuts,
        embed_bytes=5 * 10**7, head_bytes=6 * 10**7,
    )  # fmt: skip
    usable = [size * 10**6 for size in sizes_mb]
    found = fit_layers([card] * len(usable), usable, 1024)
    assert (found is not None) == _exists(card, usable, 0)
    if found is not None:
        assert [layer for part in found for layer in part] == list(range(layers))
        for part, size in zip(found, usable, strict=True):
            assert part and stage_bytes(card, part.start, part.stop, 1024) <= size
            assert part.start == 0 or part.start in cuts


def _exists(card: ModelCard, usable: list[int], start: int) -> bool:
    """By trying all cuts."""
    if not usable:
        return start == card.num_layers
    stops = [*(cut for cut in card.legal_cuts if cut > start), card.num_layers]
    return any(
        stage_bytes(card, start, stop, 1024) <= usable[0] and _exists(card, usable[1:], stop)
        for stop in stops
        if stop > start
    )


@pytest.mark.parametrize(
    ("window_mb", "memory_gb", "sequences"),
    [
        (0, 40.0, 0),  # only tokens count
        (3, 40.0, 32),  # 96 MB of a window per layer, beside 436 MB of weights: less than a quarter
        (6, 40.0, 16),
        (20, 40.0, 8),  # 8 take more than a quarter, but so many there must be room for
        (3, 19.5, 16),  # 32 would not fit
    ],
)
def test_a_model_with_windows_runs_as_many_sequences_as_are_cheap_and_fit(
    window_mb: int, memory_gb: float, sequences: int
) -> None:
    windows = (window_mb * 10**6,) * 32 if window_mb else ()
    card = replace(LLAMA_8B, kv_fixed_bytes=windows)
    plan = place(card, memory_gb)
    assert plan.pool_sequences == sequences
    (stage,) = plan.stages
    expected = card.shard_bytes(0, 32) + card.kv_bytes(0, 32, plan.pool_tokens, sequences) + ENGINE_OVERHEAD_BYTES
    assert stage.reserve_bytes == expected <= memory_gb * GB


@pytest.mark.parametrize(
    ("memory_gb", "context_limit", "pool_tokens"),
    [
        (40.0, 8192, 3 * [16384]),  # 131 KB for a token: 2.1 GB beside 16.3 GB, 4.3 GB would be more than a quarter
        (40.0, 2048, 3 * [16384]),
        (40.0, 131072, 3 * [131072]),  # one context is more than is cheap, and stays what it is
        (22.0, 8192, [8192, 16384, 16384]),  # a quarter of the 5.7 GB beside the weights are not enough for more
        (17.6, 512, [8192, 16384, 16384]),
        (16.6, 512, [512, 16384, 16384]),  # one context is all that fits
    ],
)
def test_a_pool_is_larger_where_that_is_cheap_on_every_stage(
    memory_gb: float, context_limit: int, pool_tokens: list[int]
) -> None:
    sizes = ((memory_gb,), (memory_gb, memory_gb), (memory_gb, memory_gb, memory_gb))
    plans = [place(LLAMA_8B, *size, context_limit=context_limit, min_peers=len(size)) for size in sizes]
    assert [plan.pool_tokens for plan in plans] == pool_tokens
    assert [len(plan.stages) for plan in plans] == [1, 2, 3], "room for more requests never takes more peers"


def test_a_small_model_has_room_for_thirty_two_requests() -> None:
    small = replace(LLAMA_8B, layer_bytes=(1 << 20,) * 32, kv_bytes_per_token=32, embed_bytes=1 << 20)
    assert place(small, 8, context_limit=2048).pool_tokens == 32 * 2048


@pytest.mark.parametrize(("even", "split"), [(False, [23, 9]), (True, [16, 16])])
def test_layers_are_divided_by_memory_unless_an_even_split_is_asked_for(even: bool, split: list[int]) -> None:
    peers = [Candidate("p0", 80 * GB, "mlx"), Candidate("p1", 30 * GB, "mlx")]
    plan = solve(
        LLAMA_8B, peers, policy="memory", min_peers=2, context_limit=4096, instance_id="i-1",
        ballot=Ballot(1, "p0"), around=Surroundings(even=even),
    )  # fmt: skip
    assert [stage.shard.stop - stage.shard.start for stage in plan.stages] == split


@pytest.mark.parametrize("policy", ["memory", "latency", "throughput"])
def test_an_even_split_gives_way_where_a_peer_has_no_room_for_it(policy: str) -> None:
    peers = [Candidate("p0", 80 * GB, "mlx", 0.01), Candidate("p1", 5 * GB, "mlx", 0.5)]
    plan = solve(
        LLAMA_8B, peers, policy=policy, min_peers=2, context_limit=4096, instance_id="i-1",
        ballot=Ballot(1, "p0"), around=Surroundings(even=True),
    )  # fmt: skip
    assert plan.stages[1].reserve_bytes <= 5 * GB < stage_bytes(LLAMA_8B, 16, 32, plan.kv_tokens)


def test_peers_of_a_higher_tier_come_after_all_others() -> None:
    wanted, second, last = (Candidate(f"p{tier}", GB, "mlx", tier=tier) for tier in (0, 1, 4))
    assert list(by_tier([last, wanted, second])) == [[wanted], [wanted, second], [last, wanted, second]]


ENGRAM_ROWS = {1: 384_006_168, 14: 384_016_682}
"""Rows of the tables of n-grams of DeepSeek-V4.1-Flash; a row has 256 bytes and 8 of scales."""


def test_tables_that_stay_on_disk_take_no_memory_in_a_plan() -> None:
    """DeepSeek-V4.1-Flash: 203 GB of its 510 GB are rows that are read when they are looked up."""
    tables = tuple(264 * ENGRAM_ROWS.get(index, 0) for index in range(40))
    layers = (307_555_321_165 - 2 * LLAMA_8B.embed_bytes) // 40
    held = replace(LLAMA_8B, num_layers=40, layer_bytes=(layers,) * 40, legal_cuts=tuple(range(40)))
    on_disk = replace(held, table_bytes=tables)
    in_memory = replace(
        held, layer_bytes=tuple(size + table for size, table in zip(held.layer_bytes, tables, strict=True))
    )
    assert on_disk.total_bytes == in_memory.total_bytes and on_disk.disk_bytes == 202_758_032_400
    assert ring(place(on_disk, 96, 96, 96, 96)) == ring(place(held, 96, 96, 96, 96))
    with pytest.raises(PlacementError):
        place(in_memory, 96, 96, 96, 96)
