"""Rings of several engines: only where one does not do, with each engine's own arithmetic and cuts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.fitting import stage_starts
from exo_mesh.domain.footprint import stage_bytes
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.pinning import Pin, solve_pinned
from exo_mesh.domain.placement import solve, solve_with_most_context
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.recovery import recover
from exo_mesh.domain.ring_candidates import NOTHING_KNOWN, Candidate, Surroundings
from exo_mesh.errors import InputError, PlacementError
from tests.domain.test_placement import GB, LLAMA_8B

IN_FLOAT32 = replace(
    LLAMA_8B, layer_bytes=(872_000_000,) * 32, embed_bytes=2_100_000_000, head_bytes=2_100_000_000,
    kv_layer_bytes=(8192,) * 32,
)  # fmt: skip
"""The model as an engine holds it that widens bfloat16."""

WIDE = Surroundings(cards={"numpy": IN_FLOAT32})


def peers(*specs: tuple[float, str]) -> list[Candidate]:
    return [Candidate(f"p{i}", int(gb * GB), engine) for i, (gb, engine) in enumerate(specs)]


def placed(
    candidates: list[Candidate], around: Surroundings = NOTHING_KNOWN, *, mixing: str = "auto", least: int = 1,
    card: ModelCard = LLAMA_8B, policy: str = "memory",
) -> Plan:  # fmt: skip
    return solve(
        card, candidates, policy=policy, min_peers=least, context_limit=2048, instance_id="i", ballot=Ballot(1, "p0"),
        around=around, mixing=mixing,
    )  # fmt: skip


def ring(plan: Plan) -> list[tuple[str, str]]:
    return [(stage.peer_id, stage.engine) for stage in plan.stages]


def test_one_engine_is_preferred_even_if_it_takes_more_peers() -> None:
    plan = placed(peers((9, "mlx"), (16, "torch"), (12, "mlx")))
    assert ring(plan) == [("p0", "mlx"), ("p2", "mlx")]


def test_engines_are_mixed_when_none_has_enough_peers() -> None:
    plan = placed(peers((9, "mlx"), (12, "torch")))
    assert ring(plan) == [("p0", "mlx"), ("p1", "torch")]


def test_each_stage_is_counted_as_its_engine_holds_it() -> None:
    plan = placed(peers((9, "mlx"), (30, "numpy")), WIDE)
    (mlx, wide) = plan.stages
    assert mlx.reserve_bytes == stage_bytes(LLAMA_8B, mlx.shard.start, mlx.shard.stop, 8192)
    assert wide.reserve_bytes == stage_bytes(IN_FLOAT32, wide.shard.start, wide.shard.stop, 8192)
    assert mlx.reserve_bytes <= 9 * GB and wide.reserve_bytes <= 30 * GB


def test_what_would_fit_as_in_the_files_is_refused_if_its_engine_takes_more() -> None:
    assert len(placed(peers((20, "numpy"))).stages) == 1
    with pytest.raises(PlacementError, match=r"needs 3[0-9]\.\d+ GB"):
        placed(peers((20, "numpy")), WIDE)


def test_a_boundary_is_legal_for_both_sides() -> None:
    around = Surroundings(
        cards={
            "mlx": replace(LLAMA_8B, legal_cuts=(4, 8, 12, 16, 20)),
            "torch": replace(LLAMA_8B, legal_cuts=(6, 12, 18, 24)),
        }
    )
    plan = placed(peers((9, "mlx"), (12, "torch"), (8, "mlx")), around, mixing="always", least=2)
    assert [stage.shard.start for stage in plan.stages][1] == 12


def test_mixing_can_be_asked_for_and_forbidden() -> None:
    roomy = peers((64, "mlx"), (64, "torch"), (64, "mlx"))
    assert len(placed(roomy).stages) == 1
    assert set(placed(roomy, mixing="always").engines) == {"mlx", "torch"}
    with pytest.raises(PlacementError, match="A ring of several engines would fit: allow it") as refused:
        placed(peers((9, "mlx"), (12, "torch")), mixing="never")
    assert refused.value.reason == "mixing"
    with pytest.raises(PlacementError, match="all peers run mlx"):
        placed(peers((9, "mlx"), (12, "mlx")), mixing="always")


def test_min_peers_asks_for_mixing_where_one_engine_has_too_few() -> None:
    plan = placed(peers((64, "mlx"), (64, "torch")), least=2)
    assert ring(plan) == [("p0", "mlx"), ("p1", "torch")]


def test_engines_that_do_not_agree_do_not_share_a_ring() -> None:
    apart = Surroundings(unmixable={frozenset(("mlx", "torch")): "mlx and torch differ by 1.0 in layer 3"})
    with pytest.raises(PlacementError, match=r"would fit, but mlx and torch differ by 1\.0 in layer 3") as refused:
        placed(peers((9, "mlx"), (12, "torch")), apart)
    assert refused.value.reason == "mixing"
    three = peers((9, "mlx"), (12, "torch"), (13, "numpy"))
    assert set(placed(three, apart).engines) <= {"mlx", "numpy"}


def test_builds_are_kept_apart_not_names() -> None:
    old, new = (("torch", "torch-cpu 1"),), (("torch", "torch-cuda 2"),)
    candidates = [
        Candidate("p0", 9 * GB, "mlx", builds=(("mlx", "mlx-metal 1"),)),
        Candidate("p1", 12 * GB, "torch", builds=old),
        Candidate("p2", 10 * GB, "torch", builds=new),
    ]
    apart = Surroundings(unmixable={frozenset(("mlx-metal 1", "torch-cpu 1")): "they differ"})
    assert ring(placed(candidates, apart, mixing="always")) == [("p0", "mlx"), ("p2", "torch")]


def test_a_ring_of_an_engine_that_all_have_is_better_than_none() -> None:
    candidates = [
        Candidate("p0", 12 * GB, "mlx", others=("torch",)),
        Candidate("p1", 12 * GB, "torch"),
    ]
    apart = Surroundings(unmixable={frozenset(("mlx", "torch")): "they differ"})
    assert ring(placed(candidates)) == [("p0", "mlx"), ("p1", "torch")]
    assert ring(placed(candidates, apart)) == [("p0", "torch"), ("p1", "torch")]


def test_a_longer_context_is_no_reason_to_mix() -> None:
    def longest(*candidates: Candidate) -> Plan:
        return solve_with_most_context(
            LLAMA_8B, list(candidates), policy="memory", min_peers=1, instance_id="i", ballot=Ballot(1, "p0")
        )

    alone, mixed = peers((19, "mlx")), peers((19, "mlx"), (64, "torch"))
    assert longest(*alone).context_limit == 16384
    assert ring(longest(*mixed)) == [("p1", "torch")], "a larger peer alone is better than both"


def test_pins_may_mix_engines_and_name_them() -> None:
    candidates = [Candidate("p0", 20 * GB, "mlx", others=("numpy",)), Candidate("p1", 40 * GB, "torch")]

    def pinned(*pins: Pin, around: Surroundings = WIDE, mixing: str = "auto") -> Plan:
        return solve_pinned(
            LLAMA_8B, candidates, pins, context_limit=2048, instance_id="i", ballot=Ballot(1, "p9"), around=around,
            mixing=mixing,
        )  # fmt: skip

    plan = pinned(Pin("p0", 0, 8, "numpy"), Pin("p1", 8, 32))
    assert ring(plan) == [("p0", "numpy"), ("p1", "torch")]
    assert plan.stages[0].reserve_bytes == stage_bytes(IN_FLOAT32, 0, 8, plan.pool_tokens)
    with pytest.raises(InputError, match="p1 is pinned with mlx, but can run the model only with torch"):
        pinned(Pin("p0", 0, 8), Pin("p1", 8, 32, "mlx"))
    with pytest.raises(InputError, match="so a ring needs several engines"):
        pinned(Pin("p0", 0, 32), mixing="always")
    apart = Surroundings(unmixable={frozenset(("numpy", "torch")): "they differ by 0.5"})
    with pytest.raises(PlacementError, match=r"they differ by 0\.5"):
        pinned(Pin("p0", 0, 8, "numpy"), Pin("p1", 8, 32), around=apart)


def test_a_mixed_ring_recovers_with_each_peer_on_its_engine() -> None:
    old = placed(peers((12, "mlx"), (40, "numpy"), (12, "mlx")), WIDE, mixing="always", least=3)
    old = replace(old, activation_dtype="float32")
    lost = next(stage for stage in old.stages if stage.engine == "mlx" and stage.peer_id != "p0")
    alive = [stage for stage in old.stages if stage is not lost]
    found = recover(
        LLAMA_8B,
        old,
        holding={stage.peer_id: range(stage.shard.start, stage.shard.stop) for stage in alive},
        usable_bytes={stage.peer_id: 60 * GB for stage in alive},
        spares=[Candidate("p8", 60 * GB, "torch"), Candidate("p9", 20 * GB, "mlx")],
        ballot=Ballot(2, "p0"),
        around=WIDE,
    )
    assert {stage.peer_id: stage.engine for stage in found.plan.stages} == {"p0": "mlx", "p1": "numpy", "p9": "mlx"}
    assert found.plan.activation_dtype == "float32" and found.total_load_bytes == found.load_bytes["p9"]


@settings(max_examples=60, deadline=None)
@given(
    specs=st.lists(st.tuples(st.integers(1, 24), st.sampled_from(("mlx", "torch", "numpy"))), min_size=1, max_size=5),
    cuts=st.dictionaries(
        st.sampled_from(("mlx", "torch")), st.lists(st.integers(1, 31), min_size=1, unique=True), max_size=2
    ),
    mixing=st.sampled_from(("auto", "never", "always")),
    policy=st.sampled_from(("memory", "throughput")),
)
def test_every_plan_is_lawful(
    specs: list[tuple[int, str]], cuts: dict[str, list[int]], mixing: str, policy: str
) -> None:
    cards = {"numpy": IN_FLOAT32} | {engine: replace(LLAMA_8B, legal_cuts=tuple(at)) for engine, at in cuts.items()}
    around = Surroundings(cards=cards, unmixable={frozenset(("mlx", "torch")): "they differ"})
    candidates = peers(*((float(gb), engine) for gb, engine in specs))
    try:
        plan = placed(candidates, around, mixing=mixing, policy=policy)
    except PlacementError:
        return
    usable = {candidate.peer_id: candidate.usable_bytes for candidate in candidates}
    assert [layer for stage in plan.stages for layer in stage.shard.layers] == list(range(32))
    assert not {"mlx", "torch"} <= set(plan.engines)
    assert len(plan.engines) in {"auto": (1, 2, 3), "never": (1,), "always": (2, 3)}[mixing]
    for index, stage in enumerate(plan.stages):
        held = around.held(LLAMA_8B, stage.engine)
        assert stage.reserve_bytes == stage_bytes(held, stage.shard.start, stage.shard.stop, plan.pool_tokens)
        assert stage.reserve_bytes <= usable[stage.peer_id]
        before = around.held(LLAMA_8B, plan.stages[max(0, index - 1)].engine)
        assert stage.shard.start in stage_starts(held) and stage.shard.start in stage_starts(before)
