"""Converts plans and ballots to protobuf and back."""

from __future__ import annotations

from typing import Any, NamedTuple

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs
from exo_mesh.domain.shard import Kept
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.wire.message_codec import Codec, by_hand
from exo_mesh.wire.proto import plan_pb2 as pb

BALLOT = Codec(Ballot, pb.Ballot)
PLAN = Codec(Plan, pb.Plan)
RANK = Codec(RankWiring, pb.RankWiring)

ballot_to_proto, ballot_from_proto = BALLOT.write, BALLOT.read
plan_to_proto, plan_from_proto = PLAN.write, PLAN.read
rank_to_proto, rank_from_proto = RANK.write, RANK.read


class _Candidate(NamedTuple):
    peer_id: str
    usable_bytes: int
    on_disk: Kept


_CANDIDATE = Codec(_Candidate, pb.PlanCandidate)


def _inputs_from_proto(message: pb.Plan) -> PlanInputs:
    found = [_CANDIDATE.read(one) for one in message.candidates]
    return PlanInputs(
        candidates=tuple((one.peer_id, one.usable_bytes) for one in found),
        policy=message.policy,
        min_peers=message.min_peers,
        on_disk=tuple(sorted((one.peer_id, one.on_disk) for one in found if one.on_disk)),
    )


def _inputs_to_proto(inputs: PlanInputs) -> dict[str, Any]:
    on_disk = dict(inputs.on_disk)
    candidates = [_Candidate(peer, usable, on_disk.get(peer, ())) for peer, usable in inputs.candidates]
    return {
        "candidates": [_CANDIDATE.write(one) for one in candidates],
        "policy": inputs.policy,
        "min_peers": inputs.min_peers,
    }


by_hand(PlanInputs, _inputs_from_proto, _inputs_to_proto, "candidates", "policy", "min_peers")
