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

# The driver refuses unknown fields itself, by an event.
GENERATE = PeerStream(
    "Generate", pb.GenerateRequest, pb.GenerateEvents, ANYBODY, deadline_s=None, takes_unknown=True, service="Driver"
)
RECALL = PeerCall(
    "Recall", pb.RecallRequest, pb.RecallReply, ANYBODY, deadline_s=RECALL_S, takes_unknown=True, service="Driver"
)
PUT_IMAGE = PeerUpload("PutImage", pb.ImagePiece, pb.PutImageReply, ANYBODY, deadline_s=UPLOAD_S, service="Driver")
