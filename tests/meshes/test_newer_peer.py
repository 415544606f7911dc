"""A node of the next version of the protocol, between two of today: it is refused what they cannot do, and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_mesh import PROTOCOL_VERSION
from tests.support.newer_version.sitecustomize import NEEDS_FIELD, NEEDS_OP
from tools.faults.invariants import one_view
from tools.faults.mesh import FaultMesh, Node, wait_until, why_not
from tools.faults.stream import Stream, counting

NEWER = Path(__file__).resolve().parents[1] / "support" / "newer_version"
QUESTION = counting(7, 12)

pytestmark = [pytest.mark.extended, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultMesh]:
    """nodes[1] is the newer one."""
    mesh = FaultMesh(tmp_path_factory.mktemp("mesh"))
    try:
        for _ in range(3):
            mesh.add()
        newer = mesh.nodes[1]
        newer.environ = {**newer.environ, "PYTHONPATH": os.pathsep.join([str(NEWER), newer.environ["PYTHONPATH"]])}
        mesh.start()
        yield mesh
    finally:
        mesh.close()
    assert not [node.number for node in mesh.nodes if "Traceback (most recent call last)" in node.log]


def ended(node: Node, **fields: int) -> Stream:
    stream = Stream(node, QUESTION, **fields)
    stream.await_end(60)
    return stream


def test_all_have_one_view_and_know_each_others_versions(mesh: FaultMesh) -> None:
    assert [node.api.get("/version")["protocol"] for node in mesh.nodes] == [
        PROTOCOL_VERSION,
        PROTOCOL_VERSION + 1,
        PROTOCOL_VERSION,
    ]
    wait_until(lambda: one_view(mesh.nodes), 30, "one view, with a record that only one of them can read")
    for node in mesh.nodes:
        assert {peer["version"] for peer in node.state()["view"]["peers"]} == {"0.1.0", "9.0.0"}
        assert node.api.get("/v1/topology")["refused"] == []


def test_a_ring_over_both_answers_and_an_old_driver_refuses_one_request(mesh: FaultMesh) -> None:
    mesh.place(mesh.nodes)
    for node in mesh.nodes:
        assert ended(node).is_right
    beside = Stream(mesh.nodes[0], counting(20, 60))
    refused = ended(mesh.nodes[1], max_tokens=NEEDS_FIELD)
    assert refused.error == "peer_version" and "does not know field 900 of GenerateRequest" in refused.message
    beside.await_end(60)
    assert beside.is_right and ended(mesh.nodes[1]).is_right
    assert ended(mesh.nodes[0], max_tokens=NEEDS_FIELD).is_right, "nothing new in it"


def test_old_stages_refuse_the_operation_of_a_newer_driver_for_its_request_only(mesh: FaultMesh) -> None:
    first, newer, third = mesh.nodes
    mesh.place([first, third, newer])
    beside = Stream(third, counting(20, 60))
    refused = ended(first, max_tokens=NEEDS_OP)
    assert refused.error == "peer_version" and "does not know the operation Pin" in refused.message
    beside.await_end(60)
    assert beside.is_right and ended(third).is_right
    assert all(len(node.state()["view"]["peers"]) == 3 for node in mesh.nodes)
