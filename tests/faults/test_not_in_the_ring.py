"""What becomes of peers that are not in a ring is nothing to it: not to its text, its processes or its ballot."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.mesh import FaultMesh, fault_mesh, wait_until
from tools.faults.record import Row, keep
from tools.faults.stream import Stream, counting

LONG = counting(10, 80)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[FaultMesh]:
    """Four nodes: a ring over the second and third, placed by the first; the fourth comes and goes."""
    with fault_mesh(tmp_path, 4) as made:
        made.proxy.shape(*made.ways(), delay_s=HOP_S)
        yield made


def processes(instance: dict[str, Any]) -> list[int]:
    return [stage["pid"] for stage in instance["stages"]]


def test_peers_outside_a_ring_come_and_go_without_effect(mesh: FaultMesh) -> None:
    owner, *ring, other = mesh.nodes
    before = mesh.place(ring, at=owner)
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
    assert not ring[0].metric("exo_mesh_requests_resumed_total") + ring[0].metric("exo_mesh_driver_redials_total")
    check_all(mesh, [stream], since, visible=False)


def test_the_death_of_the_owner_of_a_ring_that_has_no_stage_of_it_costs_no_token(mesh: FaultMesh) -> None:
    """Its lowest member adopts it; no stage stops."""
    owner, *ring, _ = mesh.nodes
    before = mesh.place(ring, at=owner)
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
    assert not ring[0].metric("exo_mesh_requests_resumed_total") + ring[0].metric("exo_mesh_driver_redials_total")
    gap_s = stream.gap_s(since)
    check_all(mesh, [stream], since)
    test = "test_not_in_the_ring.py::test_the_death_of_the_owner_of_a_ring_that_has_no_stage_of_it_costs_no_token"
    keep(Row("F8", "the owner, outside the ring, is killed", test, adopted_s, gap_s, 0, 0, "adopted, not re-formed"))
