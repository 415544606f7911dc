"""The call that measures the speed of a path: the answer has this node's id and a payload (paths.proto)."""

from __future__ import annotations

from exo_mesh.domain.addresses import MAX_PROBE_BYTES
from exo_mesh.wire.call_access import ANYBODY
from exo_mesh.wire.peer_call import CALL_S, CallAnswer, PeerCall, answer
from exo_mesh.wire.proto import paths_pb2 as pb

_PAYLOAD = bytes(MAX_PROBE_BYTES)

PROBE_PATH = PeerCall("ProbePath", pb.PathProbeRequest, pb.PathProbeReply, ANYBODY, deadline_s=CALL_S, service="Paths")


def path_request(reply_bytes: int = 0) -> pb.PathProbeRequest:
    """Asks for a payload of so many bytes, but at most MAX_PROBE_BYTES."""
    return pb.PathProbeRequest(reply_bytes=reply_bytes)


def path_answer(peer_id: str) -> CallAnswer[pb.PathProbeRequest, pb.PathProbeReply]:
    """Answers from memory. The zeros are not compressed: gRPC compresses only on request."""

    async def probe_path(request: pb.PathProbeRequest) -> pb.PathProbeReply:
        return pb.PathProbeReply(peer_id=peer_id, payload=_PAYLOAD[: request.reply_bytes])

    return answer(PROBE_PATH, probe_path)
