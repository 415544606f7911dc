"""What a peer holds of an instance, of whatever plan, and what of that another plan may go on with."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.domain.plan import Plan
from exo_mesh.node.reservations import Lease
from exo_mesh.proto import control_pb2 as pb


@dataclass(frozen=True, slots=True)
class Standing:
    """held: the layers of a runner that is well, or None. usable_bytes: what a stage of the instance could get here,
    with what it has. linked: the hop from this stage to the next one is up. rolls_back: its KV can be cut back."""

    held: range | None
    usable_bytes: int
    linked: bool = False
    rolls_back: bool = False


def goes_on(started: Lease, plan: Plan, index: int) -> bool:
    """May a process that was started for one plan go on as stage `index` of another, with its weights?"""
    old, new = started.plan, plan
    return (
        (started.stage.engine, started.stage.shard) == (new.stages[index].engine, new.stages[index].shard)
        and (old.model, old.model_digest) == (new.model, new.model_digest)
        and (old.context_limit, old.activation_dtype) == (new.context_limit, new.activation_dtype)
    )


def standing_to_proto(standing: Standing, why_not: str) -> pb.LookAtStageReply:
    """why_not: why the stage of the plan that was asked for does not run here; "" if it does."""
    reply = pb.LookAtStageReply(
        runs=not why_not,
        reason=why_not,
        usable_bytes=standing.usable_bytes,
        linked=standing.linked,
        rolls_back=standing.rolls_back,
    )
    if standing.held is not None:
        reply.held.start, reply.held.stop = standing.held.start, standing.held.stop
    return reply


def standing_from_proto(reply: pb.LookAtStageReply) -> Standing:
    held = range(reply.held.start, reply.held.stop) if reply.HasField("held") else None
    return Standing(held, reply.usable_bytes, reply.linked, reply.rolls_back)
