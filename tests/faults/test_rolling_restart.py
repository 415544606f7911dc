"""Every peer of a mesh is taken away and comes back, one by one, while clients ask: none of them sees an error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from exo_mesh.cli import exit_codes
from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.load import Clients
from tools.faults.mesh import Meshes, Node, wait_until
from tools.faults.record import Row, keep

STREAMS = 4


def drain(node: Node) -> None:
    """As an upgrade by hand does it."""
    assert node.child is not None
    node.api.post("/drain", {})
    wait_until(lambda: node.api.get("/drain")["requests"] == 0, 60, "what entered there is answered")
    node.child.stop()


def terminate(node: Node) -> None:
    """As `systemctl restart` does it: one signal, without a word before."""
    assert node.child is not None
    os.kill(node.child.pid, signal.SIGTERM)
    node.child._process.wait(40)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stop", [drain, terminate])
def test_no_client_sees_an_error_when_all_peers_restart_one_by_one(
    stop: Callable[[Node], None], meshes: Meshes
) -> None:
    mesh = meshes.of(3)
    mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S / 4)
    mesh.place(mesh.nodes)
    since = time.time()
    clients = Clients(mesh.nodes, STREAMS, seed=1)
    clients.await_answers(STREAMS)
    for node in mesh.nodes:
        stop(node)
        assert node.child is not None and node.child._process.returncode == exit_codes.OK
        mesh.start()
        clients.await_answers(STREAMS)
    clients.stop()
    longest_s = max(answer.gap_s(answer.sent_at) for answer in clients.answers)
    check_all(mesh, clients.answers, since, visible=False)
    test = "test_rolling_restart.py::test_no_client_sees_an_error_when_all_peers_restart_one_by_one"
    note = f"{len(clients.answers)} answers of {STREAMS} clients, no error; longest pause {longest_s:.1f} s"
    keep(
        Row(
            "rolling restart",
            f"three peers stopped ({stop.__name__}) and started one by one",
            test,
            None,
            longest_s,
            None,
            0,
            note,
        )
    )
