"""The calls of entry peers to the driver of a ring (driver.proto). The driver's runner serves them itself."""

from __future__ import annotations

from exo_mesh.wire.call_access import ANYBODY
from exo_mesh.wire.peer_call import PeerCall, PeerStream, PeerUpload
from exo_mesh.wire.proto import driver_pb2 as pb

RECALL_S = 1.0
"""Deadline of a lookup in the driver's memory: the client waits, and without an answer the tokens are only computed
again."""

UPLOAD_S = 120.0
"""Longest time for the pixels of one image."""

GENERATE = PeerStream(
    name="Generate",
    request=pb.GenerateRequest,
    reply=pb.GenerateEvents,
    deadline_s=None,
    access=ANYBODY,
    takes_unknown=True,  # the driver refuses it by an event
    service="Driver",
)
RECALL = PeerCall(
    name="Recall",
    request=pb.RecallRequest,
    reply=pb.RecallReply,
    deadline_s=RECALL_S,
    access=ANYBODY,
    takes_unknown=True,
    service="Driver",
)
PUT_IMAGE = PeerUpload(
    name="PutImage",
    request=pb.ImagePiece,
    reply=pb.PutImageReply,
    deadline_s=UPLOAD_S,
    access=ANYBODY,
    service="Driver",
)
