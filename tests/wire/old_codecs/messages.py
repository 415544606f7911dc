"""Converts peer updates, summaries and deletions to protobuf and back."""

from __future__ import annotations

from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.swim import MAX_ACCUSERS, Life, SwimState, Update
from exo_mesh.wire.proto import control_pb2 as pb
from tests.wire.old_codecs.plan_codec import ballot_from_proto, ballot_to_proto

_STATES = {
    SwimState.ALIVE: pb.PEER_STATE_ALIVE,
    SwimState.SUSPECT: pb.PEER_STATE_SUSPECT,
    SwimState.DEAD: pb.PEER_STATE_DEAD,
    SwimState.LEFT: pb.PEER_STATE_LEFT,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def update_to_proto(update: Update, record: pb.Record | None = None) -> pb.PeerUpdate:
    return pb.PeerUpdate(
        peer_id=update.peer_id,
        state=_STATES[update.state],
        incarnation=update.life.incarnation,
        refutation=update.life.refutation,
        record=record,
        accusers=update.accusers,
    )


def update_from_proto(message: pb.PeerUpdate) -> Update | None:
    """The update of a message; None if this version does not know its state or an id is out of range."""
    state = _STATES_BACK.get(message.state)
    if state is None or not 0 < len(message.peer_id) <= 64:
        return None
    accusers = tuple(one for one in message.accusers[:MAX_ACCUSERS] if 0 < len(one) <= 64)
    return Update(message.peer_id, state, Life(message.incarnation, message.refutation), accusers)


def summary_to_proto(update: Update, newest: int, digest: int) -> pb.OwnerSummary:
    return pb.OwnerSummary(
        owner=update.peer_id,
        state=_STATES[update.state],
        incarnation=update.life.incarnation,
        refutation=update.life.refutation,
        newest=newest,
        digest=digest,
    )


def update_in_summary(message: pb.OwnerSummary) -> Update | None:
    state = _STATES_BACK.get(message.state)
    if state is None or not 0 < len(message.owner) <= 64:
        return None
    return Update(message.owner, state, Life(message.incarnation, message.refutation))


def fence_to_proto(fence: Fence) -> pb.Fence:
    return pb.Fence(instance_id=fence.instance_id, ballot=ballot_to_proto(fence.ballot), left_s=fence.left_s)


def fence_from_proto(message: pb.Fence) -> Fence:
    return Fence(message.instance_id, ballot_from_proto(message.ballot), message.left_s)
