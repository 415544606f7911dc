"""Converts the status of a peer's stage to protobuf and back."""

from __future__ import annotations

from exo_mesh.domain.stage import StageStatus
from exo_mesh.wire.proto import control_pb2 as pb
from tests.wire.old_codecs.plan_codec import ballot_from_proto, ballot_to_proto


def status_to_proto(status: StageStatus, why_not: str) -> pb.LookAtStageReply:
    """why_not: why the stage of the requested plan does not run here; "" if it does."""
    reply = pb.LookAtStageReply(
        runs=not why_not,
        reason=why_not,
        usable_bytes=status.usable_bytes,
        linked=status.linked,
        rolls_back=status.rolls_back,
        promised=ballot_to_proto(status.promised),
    )
    if status.held is not None:
        reply.held.start, reply.held.stop = status.held.start, status.held.stop
    return reply


def status_from_proto(reply: pb.LookAtStageReply) -> StageStatus:
    held = range(reply.held.start, reply.held.stop) if reply.HasField("held") else None
    promised = ballot_from_proto(reply.promised)
    return StageStatus(held, reply.usable_bytes, reply.linked, reply.rolls_back, promised)
