"""The calls that no package of a node answers: those of entry peers to the driver of a ring (driver.proto), which its
runner answers, and path probes, which the control server answers (paths.proto)."""

from __future__ import annotations

from exo_mesh.domain.addresses import MAX_PROBE_BYTES
from exo_mesh.wire.call_access import ANYBODY
from exo_mesh.wire.peer_call import CALL_S, CallAnswer, PeerCall, PeerStream, PeerUpload, answer
from exo_mesh.wire.proto import driver_pb2 as pb
from exo_mesh.wire.proto import paths_pb2

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

_PAYLOAD = bytes(MAX_PROBE_BYTES)

PROBE_PATH = PeerCall(
    "ProbePath", paths_pb2.PathProbeRequest, paths_pb2.PathProbeReply, ANYBODY, deadline_s=CALL_S, service="Paths"
)


def path_request(reply_bytes: int = 0) -> paths_pb2.PathProbeRequest:
    """Asks for a payload of so many bytes, but at most MAX_PROBE_BYTES."""
    return paths_pb2.PathProbeRequest(reply_bytes=reply_bytes)


def path_answer(peer_id: str) -> CallAnswer[paths_pb2.PathProbeRequest, paths_pb2.PathProbeReply]:
    """Answers from memory. The zeros are not compressed: gRPC compresses only on request."""

    async def probe_path(request: paths_pb2.PathProbeRequest) -> paths_pb2.PathProbeReply:
        return paths_pb2.PathProbeReply(peer_id=peer_id, payload=_PAYLOAD[: request.reply_bytes])

    return answer(PROBE_PATH, probe_path)
