"""What a machine has of a model's files, and what peers fetch of them, to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.models.local_files import FileHolding, Holding, Layers, Wants
from exo_mesh.proto import control_pb2 as pb


def holding_to_proto(holding: Holding) -> pb.DescribeFilesReply:
    return pb.DescribeFilesReply(
        found=True,
        model_digest=holding.digest,
        repo=holding.repo,
        revision=holding.revision,
        files=[
            pb.FileSpans(
                name=name, size=file.size, sha256=file.sha256, spans=[edge for s in file.present for edge in s]
            )
            for name, file in holding.files.items()
        ],
    )


def holding_from_proto(reply: pb.DescribeFilesReply) -> Holding:
    files = {
        file.name: FileHolding(file.size, file.sha256, tuple(zip(file.spans[::2], file.spans[1::2], strict=False)))
        for file in reply.files
    }
    return Holding(reply.model_digest, reply.repo[:200], reply.revision[:200], files)


def wants_to_proto(wants: Wants) -> list[pb.PeerLayers]:
    return [
        pb.PeerLayers(peer=peer_id, whole=True)
        if layers is None
        else pb.PeerLayers(peer=peer_id, layers=pb.LayerRange(start=layers[0], stop=layers[1]))
        for peer_id, layers in wants.items()
    ]


def wants_from_proto(messages: Sequence[pb.PeerLayers]) -> dict[str, Layers]:
    return {one.peer: None if one.whole else (one.layers.start, one.layers.stop) for one in messages}
