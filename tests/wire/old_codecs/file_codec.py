"""Converts a machine's model files, and the files that peers want, to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.domain.spans import Spans, common, merged
from exo_mesh.errors import InputError
from exo_mesh.mesh.membership.peers import MAX_PEERS
from exo_mesh.models.local_files import Holding, Layers, Wants
from exo_mesh.weights.fetched import FetchedFile
from exo_mesh.wire.proto import control_pb2 as pb

MAX_SPANS = 1024
"""Most spans of one file. A stage of 80 layers has about this many; the fetch plan cuts the file at each of them."""


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
    """Reads a peer's files. Files that are cut into too many spans are ignored."""
    files = {
        file.name: FetchedFile(file.size, file.sha256[:64], list(_spans(file)))
        for file in reply.files
        if len(file.spans) <= 2 * MAX_SPANS
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
    """Reads what peers want. Raises InputError for an empty layer range, or for more peers than a mesh may have."""
    if len(messages) > MAX_PEERS:
        raise InputError(f"files are wanted for {len(messages)} peers; a mesh has at most {MAX_PEERS}")
    for one in messages:
        if not one.whole and one.layers.start >= one.layers.stop:
            raise InputError(f"layers {one.layers.start} to {one.layers.stop} are wanted, which is an empty range")
    return {one.peer: None if one.whole else (one.layers.start, one.layers.stop) for one in messages}


def _spans(file: pb.FileSpans) -> Spans:
    """Puts spans in the required form: in order, separate, inside the file."""
    pairs = zip(file.spans[::2], file.spans[1::2], strict=False)
    return common(merged(pairs), ((0, file.size),))
