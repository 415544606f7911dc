"""What peers say of files, on its way from protobuf."""

from __future__ import annotations

import pytest

from exo_mesh.errors import InputError
from exo_mesh.mesh.membership.peers import MAX_PEERS
from exo_mesh.models.calls import (
    MAX_SPANS,
    holding_from_proto,
    holding_to_proto,
    wants_from_proto,
    wants_to_proto,
)
from exo_mesh.models.local_files import Holding
from exo_mesh.weights.fetched import FetchedFile
from exo_mesh.wire.proto import control_pb2 as pb


def described(size: int, spans: list[int]) -> Holding:
    files = [pb.FileSpans(name="f", size=size, spans=spans)]
    return holding_from_proto(pb.DescribeFilesReply(found=True, files=files))


def test_what_is_held_and_wanted_comes_through() -> None:
    held = Holding("d", "org/m", "c0ffee", {"f": FetchedFile(100, "a" * 64, [(0, 10), (20, 100)])})
    assert holding_from_proto(holding_to_proto(held)) == held
    wants = {"a": (0, 4), "b": None}
    assert wants_from_proto(wants_to_proto(wants)) == wants


@pytest.mark.parametrize(
    ("sent", "understood"),
    [
        ([20, 30, 0, 10], ((0, 10), (20, 30))),
        ([0, 20, 10, 30], ((0, 30),)),
        ([30, 20], ()),
        ([90, 10**9], ((90, 100),)),
        ([0, 10, 20], ((0, 10),)),
    ],
)
def test_spans_that_no_honest_peer_sends_are_put_in_order(
    sent: list[int], understood: tuple[tuple[int, int], ...]
) -> None:
    assert described(100, sent).present["f"] == understood


def test_a_flood_of_spans_counts_as_no_file() -> None:
    assert len(described(10**9, list(range(2 * MAX_SPANS))).files["f"].present) == MAX_SPANS
    assert not described(10**9, list(range(2 * MAX_SPANS + 2))).files


def test_wants_of_more_peers_than_a_mesh_has_are_refused() -> None:
    with pytest.raises(InputError, match="1025 peers"):
        wants_from_proto([pb.PeerLayers(peer=str(number), whole=True) for number in range(MAX_PEERS + 1)])
    with pytest.raises(InputError, match="layers 4 to 4"):
        wants_from_proto([pb.PeerLayers(peer="a", layers=pb.LayerRange(start=4, stop=4))])
