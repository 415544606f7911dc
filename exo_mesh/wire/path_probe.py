"""Answers path probes with this node's id and a payload, to measure the speed of a path (paths.proto)."""

from __future__ import annotations

from typing import Any

from exo_mesh.domain.addresses import MAX_PROBE_BYTES
from exo_mesh.wire.proto import paths_pb2 as pb
from exo_mesh.wire.proto import paths_pb2_grpc as rpc

_PAYLOAD = bytes(MAX_PROBE_BYTES)


class PathProbeServicer(rpc.PathsServicer):
    """Answers from memory. The zeros are not compressed: gRPC compresses only on request."""

    def __init__(self, peer_id: str) -> None:
        self._peer_id = peer_id

    async def ProbePath(self, request: pb.PathProbeRequest, context: Any) -> pb.PathProbeReply:
        return pb.PathProbeReply(peer_id=self._peer_id, payload=_PAYLOAD[: request.reply_bytes])
