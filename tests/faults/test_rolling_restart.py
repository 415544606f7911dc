"""Every peer of a mesh is taken away and comes back, one by one, while clients ask.

Clients that choose a ready peer see no error. Of peers that stop at once, clients that retry with an
Idempotency-Key lose no answer, and neither do those behind the nginx configuration that comes with exo-mesh.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from tests.support.nginx import NGINX, shipped_nginx
from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.keyed import KeyedClients
from tools.faults.load import Clients
from tools.faults.mesh import FaultMesh, Meshes, Node, fault_mesh, wait_until
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


API_PORT = 52415


@contextlib.contextmanager
def way_to(mesh: FaultMesh, way: str, folder: Path) -> Iterator[list[str]]:
    """Where clients ask: each peer, or one nginx before all of them."""
    if way == "directly":
        yield [node.url for node in mesh.nodes]
        return
    if NGINX is None:
        pytest.skip("not installed: nginx")
    with shipped_nginx(folder, [f"{node.address}:{API_PORT}" for node in mesh.nodes]) as proxy:
        yield [proxy.url]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["directly", "nginx"])
def test_a_rolling_restart_loses_no_answer_of_clients_that_retry_with_their_key(way: str, tmp_path: Path) -> None:
    flags = ("--api-port", str(API_PORT), "--stop-grace", "0")
    with fault_mesh(tmp_path, 3, *flags) as mesh, way_to(mesh, way, tmp_path / "nginx") as urls:
        mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S / 2)
        mesh.place(mesh.nodes)
        since = time.time()
        clients = KeyedClients(lambda: urls, STREAMS, seed=2)
        clients.await_answers(STREAMS)
        for node in mesh.nodes:
            wait_until(lambda node=node: node.metric("exo_mesh_requests_in_progress"), 60, "there is something to cut")
            terminate(node)
            mesh.start()
            clients.await_answers(STREAMS)
        clients.stop()
        check_all(mesh, [], since, visible=False)
    assert clients.troubles["node_stopping"], "nobody was cut, so nobody had to try again"
    test = "test_rolling_restart.py::test_a_rolling_restart_loses_no_answer_of_clients_that_retry_with_their_key"
    asked = "directly" if way == "directly" else "through nginx"
    what = f"three peers stopped at once, one by one; clients ask {asked}"
    note = f"{len(clients.answers)} answers of {STREAMS} clients, tried again after {dict(clients.troubles)}"
    longest_s = max(answer.seconds for answer in clients.answers)
    keep(Row("rolling restart", what, test, None, longest_s, None, 0, note))
