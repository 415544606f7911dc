"""What becomes of peers that are not in a ring is nothing to it: not to its text, its processes or its ballot."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.mesh import FaultMesh, Meshes, Node, wait_until
from tools.faults.record import Row, keep
from tools.faults.stream import Stream, counting

LONG = counting(10, 80)


@pytest.fixture
def mesh(meshes: Meshes) -> FaultMesh:
    """Four nodes: a ring over the second and third, placed by the first; the fourth comes and goes."""
    made = meshes.of(4)
    made.proxy.shape(*made.ways(), delay_s=HOP_S)
    return made


def processes(instance: dict[str, Any]) -> list[int]:
    return [stage["pid"] for stage in instance["stages"]]


def disturbances(entry: Node) -> float:
    """Times that a request which entered there had to go on elsewhere, or to dial again."""
    return entry.metric("exo_mesh_requests_resumed_total") + entry.metric("exo_mesh_driver_redials_total")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_peers_outside_a_ring_come_and_go_without_effect(mesh: FaultMesh) -> None:
    owner, *ring, other = mesh.nodes
    before, disturbed = mesh.place(ring, at=owner), disturbances(ring[0])
    since = time.time()
    stream = Stream(ring[0], LONG)
    assert stream.await_text(10)
    other.send(signal.SIGKILL)
    wait_until(lambda: len(ring[0].state()["view"]["peers"]) == 3, 30, "its death is known")
    mesh.start()
    assert other.child is not None
    other.child.stop()
    mesh.await_joined()
    stream.await_end()
    assert stream.is_right
    assert ring[0].instances() == [before], "the same ballot, owner and processes"
    assert disturbances(ring[0]) == disturbed
    check_all(mesh, [stream], since, visible=False)


@pytest.mark.slow
def test_the_death_of_the_owner_of_a_ring_that_has_no_stage_of_it_costs_no_token(mesh: FaultMesh) -> None:
    """Its lowest member adopts it; no stage stops."""
    owner, *ring, _ = mesh.nodes
    before, disturbed = mesh.place(ring, at=owner), disturbances(ring[0])
    stream = Stream(ring[0], LONG)
    assert stream.await_text(10)
    since = time.time()
    owner.send(signal.SIGKILL)
    adopted_s = wait_until(
        lambda: [one["owner"] for one in ring[0].instances()] in ([node.id] for node in ring), 30, "the ring is adopted"
    )
    stream.await_end()
    assert stream.is_right
    (after,) = ring[0].instances()
    assert processes(after) == processes(before) and after["ballot"] > before["ballot"]
    assert disturbances(ring[0]) == disturbed
    mesh.start()
    gap_s = stream.gap_s(since)
    check_all(mesh, [stream], since)
    test = "test_not_in_the_ring.py::test_the_death_of_the_owner_of_a_ring_that_has_no_stage_of_it_costs_no_token"
    keep(Row("F8", "the owner, outside the ring, is killed", test, adopted_s, gap_s, 0, 0, "adopted, not re-formed"))
