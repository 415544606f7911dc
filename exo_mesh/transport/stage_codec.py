"""What a peer says of its stage, as messages."""

from __future__ import annotations

from exo_mesh.domain.stage import StageStanding
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.transport.plan_codec import ballot_from_proto, ballot_to_proto


def standing_to_proto(standing: StageStanding, why_not: str) -> pb.LookAtStageReply:
    """why_not: why the stage of the plan that was asked for does not run here; "" if it does."""
    reply = pb.LookAtStageReply(
        runs=not why_not,
        reason=why_not,
        usable_bytes=standing.usable_bytes,
        linked=standing.linked,
        rolls_back=standing.rolls_back,
        promised=ballot_to_proto(standing.promised),
    )
    if standing.held is not None:
        reply.held.start, reply.held.stop = standing.held.start, standing.held.stop
    return reply


def standing_from_proto(reply: pb.LookAtStageReply) -> StageStanding:
    held = range(reply.held.start, reply.held.stop) if reply.HasField("held") else None
    promised = ballot_from_proto(reply.promised)
    return StageStanding(held, reply.usable_bytes, reply.linked, reply.rolls_back, promised)
