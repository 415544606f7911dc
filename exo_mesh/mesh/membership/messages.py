"""Converts peer updates, summaries and deletions to protobuf and back."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from exo_mesh.domain.fields import Flat
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.swim import Life, PeerId, SwimState, Update
from exo_mesh.wire.message_codec import Codec
from exo_mesh.wire.proto import control_pb2 as pb


class Summary(NamedTuple):
    """All that a peer holds of one owner, in short; see OwnerSummary in control.proto."""

    owner: PeerId
    state: SwimState
    life: Annotated[Life, Flat()]
    newest: int
    digest: int


UPDATE = Codec(Update, pb.PeerUpdate, besides=["record"])
SUMMARY = Codec(Summary, pb.OwnerSummary)
FENCE = Codec(Fence, pb.Fence)

fence_to_proto, fence_from_proto = FENCE.write, FENCE.read


def update_to_proto(update: Update, record: pb.Record | None = None) -> pb.PeerUpdate:
    return UPDATE.write(update, record=record)


def update_from_proto(message: pb.PeerUpdate) -> Update | None:
    """The update of a message; None if this version does not know its state or an id is out of range."""
    try:
        return UPDATE.read(message)
    except ValueError:
        return None


def summary_to_proto(update: Update, newest: int, digest: int) -> pb.OwnerSummary:
    return SUMMARY.write(Summary(update.peer_id, update.state, update.life, newest, digest))


def update_in_summary(message: pb.OwnerSummary) -> Update | None:
    """The update in a summary; None as in `update_from_proto`."""
    try:
        summary = SUMMARY.read(message)
    except ValueError:
        return None
    return Update(summary.owner, summary.state, summary.life)
