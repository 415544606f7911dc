"""Converts plans and ballots to protobuf and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from exo_mesh.base.printable import printable
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import MAX_KEYS, KeptLayers, Shard
from exo_mesh.domain.tensor_group import GroupBackend, RankWiring, RdmaMatrix, TensorGroup
from exo_mesh.wire.proto import plan_pb2 as pb

MAX_KEPT = 32
"""Most parts of one model that a peer can have on its disk; the rest is cut off."""

MAX_NAME_CHARS = 64


def ballot_to_proto(ballot: Ballot) -> pb.Ballot:
    return pb.Ballot(counter=ballot.counter, proposer=ballot.proposer)


def ballot_from_proto(message: pb.Ballot) -> Ballot:
    return Ballot(message.counter, printable(message.proposer))


def plan_to_proto(plan: Plan) -> pb.Plan:
    on_disk = dict(plan.inputs.on_disk)
    return pb.Plan(
        instance_id=plan.instance_id,
        ballot=ballot_to_proto(plan.ballot),
        model=plan.model,
        model_digest=plan.model_digest,
        stages=[_stage_to_proto(stage) for stage in plan.stages],
        context_limit=plan.context_limit,
        candidates=[
            pb.PlanCandidate(peer_id=peer, usable_bytes=usable, on_disk=map(kept_to_proto, on_disk.get(peer, ())))
            for peer, usable in plan.inputs.candidates
        ],
        policy=plan.inputs.policy,
        min_peers=plan.inputs.min_peers,
        pool_tokens=plan.pool_tokens,
        activation_dtype=plan.activation_dtype,
        pool_sequences=plan.pool_sequences,
    )


def plan_from_proto(message: pb.Plan) -> Plan:
    """Raises ValueError if the stages do not hold every layer exactly once."""
    return Plan(
        instance_id=message.instance_id,
        ballot=ballot_from_proto(message.ballot),
        model=message.model,
        model_digest=message.model_digest,
        stages=tuple(_stage_from_proto(stage) for stage in message.stages),
        context_limit=message.context_limit,
        inputs=PlanInputs(
            candidates=tuple((candidate.peer_id, candidate.usable_bytes) for candidate in message.candidates),
            policy=message.policy,
            min_peers=message.min_peers,
            on_disk=tuple(
                sorted((one.peer_id, kept_from_proto(one.on_disk)) for one in message.candidates if one.on_disk)
            ),
        ),
        pool_tokens=message.pool_tokens,
        activation_dtype=message.activation_dtype,
        pool_sequences=message.pool_sequences,
    )


def kept_to_proto(kept: KeptLayers) -> pb.KeptLayers:
    size = 0 if kept.size == 1 else kept.size
    return pb.KeptLayers(
        engine=kept.engine,
        start=kept.start,
        stop=kept.stop,
        tokens=kept.tokens,
        activation_dtype=kept.activation_dtype,
        rank=kept.rank,
        size=size,
        keys=kept.keys,
    )


def kept_from_proto(messages: Sequence[pb.KeptLayers]) -> tuple[KeptLayers, ...]:
    """What a peer has on its disk of a model; MAX_KEPT at most, with MAX_KEYS keys each, and nothing that is
    impossible."""
    return tuple(
        KeptLayers(
            printable(one.engine, MAX_NAME_CHARS), one.start, one.stop, one.tokens,
            printable(one.activation_dtype, MAX_NAME_CHARS), one.rank, one.size or 1,
            tuple(sorted({*one.keys[:MAX_KEYS]})) if one.tokens else (),
        )
        for one in messages[:MAX_KEPT]
        if one.start < one.stop and one.rank < max(1, one.size)
    )  # fmt: skip


def _stage_to_proto(stage: StagePlan) -> pb.StagePlan:
    shard = stage.shard
    return pb.StagePlan(
        peer_id=stage.peer_id,
        engine=stage.engine,
        shard=pb.Shard(model=shard.model, start=shard.start, stop=shard.stop, num_layers=shard.num_layers),
        reserve_bytes=stage.reserve_bytes,
        group=None if stage.group is None else _group_to_proto(stage.group),
    )


def _stage_from_proto(message: pb.StagePlan) -> StagePlan:
    shard = message.shard
    return StagePlan(
        peer_id=message.peer_id,
        engine=message.engine,
        shard=Shard(shard.model, shard.start, shard.stop, shard.num_layers),
        reserve_bytes=message.reserve_bytes,
        group=_group_from_proto(message.group) if message.HasField("group") else None,
    )


def rank_to_proto(wiring: RankWiring) -> pb.RankWiring:
    return pb.RankWiring(
        backend=wiring.backend, rank=wiring.rank, endpoints=wiring.endpoints, rdma=_rdma_to_proto(wiring.rdma)
    )


def rank_from_proto(message: pb.RankWiring) -> RankWiring:
    """Raises ValueError if the rank is invalid."""
    return RankWiring(
        cast(GroupBackend, message.backend), message.rank, tuple(message.endpoints), _rdma_from_proto(message.rdma)
    )


def _group_to_proto(group: TensorGroup) -> pb.TensorGroup:
    return pb.TensorGroup(backend=group.backend, peers=group.peers, rdma=_rdma_to_proto(group.rdma))


def _group_from_proto(message: pb.TensorGroup) -> TensorGroup:
    return TensorGroup(cast(GroupBackend, message.backend), tuple(message.peers), _rdma_from_proto(message.rdma))


def _rdma_to_proto(matrix: RdmaMatrix) -> list[pb.RdmaRow]:
    return [pb.RdmaRow(devices=[device or "" for device in row]) for row in matrix]


def _rdma_from_proto(rows: Iterable[pb.RdmaRow]) -> RdmaMatrix:
    return tuple(tuple(device or None for device in row.devices) for row in rows)
