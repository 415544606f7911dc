"""Tensor groups as values: what is refused, and that they travel whole."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup
from exo_mesh.wire.plan_codec import plan_from_proto, plan_to_proto, rank_from_proto, rank_to_proto

RDMA = ((None, "rdma_en5"), ("rdma_en4", None))


def plan_with(group: TensorGroup | None) -> Plan:
    stages = (
        StagePlan("a", "mlx", Shard("m", 0, 3, 5), 100, group),
        StagePlan("z", "torch", Shard("m", 3, 5, 5), 80),
    )
    return Plan("i", Ballot(1, "a"), "m", "digest", stages, 128, PlanInputs((), "memory", 1))


@pytest.mark.parametrize("group", [TensorGroup("ring", ("a", "b")), TensorGroup("jaccl", ("a", "b"), RDMA)])
def test_a_group_travels_whole_and_counts_in_the_digest(group: TensorGroup) -> None:
    plan = plan_with(group)
    assert plan_from_proto(plan_to_proto(plan)) == plan
    assert plan.digest != plan_with(None).digest
    assert plan.peer_ids == ("a", "z")
    assert plan.member_ids == ("a", "b", "z")
    assert [stage.peers for stage in plan.stages] == [("a", "b"), ("z",)]


def test_a_rank_is_told_who_it_is_and_where_the_others_are() -> None:
    wiring = RankWiring("jaccl", 1, ("10.0.0.1:9000", "10.0.0.2:9001"), RDMA)
    assert rank_from_proto(rank_to_proto(wiring)) == wiring
    assert not wiring.is_leader
    assert replace(wiring, rank=0).is_leader
    with pytest.raises(ValueError, match="rank 2 is outside a group of 2"):
        replace(wiring, rank=2)


@pytest.mark.parametrize(
    ("backend", "peers", "rdma", "what"),
    [
        ("ring", ("a",), (), "at least two"),
        ("ring", ("a", "a"), (), "different"),
        ("ring", ("a", "b"), RDMA, "exactly if its backend"),
        ("jaccl", ("a", "b"), (), "exactly if its backend"),
        ("jaccl", ("a", "b", "c"), RDMA, "3 x 3"),
        ("mpi", ("a", "b"), (), "unknown backend"),
    ],
)
def test_what_is_no_group_is_refused(backend: str, peers: tuple[str, ...], rdma: tuple, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        TensorGroup(backend, peers, rdma)  # type: ignore[arg-type]


def test_only_rank_0_leads() -> None:
    with pytest.raises(ValueError, match="rank 0"):
        StagePlan("b", "mlx", Shard("m", 0, 3, 5), 100, TensorGroup("ring", ("a", "b")))
