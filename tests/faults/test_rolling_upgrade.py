"""Three nodes are upgraded one by one from the wheel of an earlier commit to the working tree, under load."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exo_mesh import PROTOCOL_VERSION
from tests.support.installs import ROOT, build_in_place, install
from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.keyed import KeyedClients
from tools.faults.mesh import DETERMINISTIC, FaultMesh, Node
from tools.faults.record import Row, keep

OLD_COMMITS = {
    "the last that spoke one protocol": "9b057b03103271b73a3658c59e65aefe9268f034",
    "the first that says a range": "0163ec215f32ff1f802421221d5b56a872b9b530",
}
"""Each must be part of the history of main. docs/reference/protocol.md says what may change while this test passes."""

API_PORT = 52415
STREAMS = 4


def wheel_of(commit: str, scratch: Path) -> Path:
    """A directory for sys.path with the package of a commit, from its wheel. Skips where git does not have it."""
    if shutil.which("git") is None:
        pytest.skip("not installed: git")
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"this copy of the repository has no commit {commit[:12]}: it is a shallow clone, or no clone")
    tree = scratch / "tree"
    tree.mkdir()
    archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    return install(build_in_place(tree, scratch), scratch / "site")


def use(node: Node, *paths: Path) -> None:
    """From its next start on the node runs what is in these directories."""
    node.environ = {**node.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": "1"}
    asked = [sys.executable, "-c", "import exo_mesh; print(exo_mesh.__file__)"]
    found = subprocess.run(asked, env=dict(node.environ), capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(paths[0]), found


def upgrade(mesh: FaultMesh, node: Node) -> None:
    assert node.child is not None
    os.kill(node.child.pid, signal.SIGTERM)
    node.child._process.wait(40)
    use(node, ROOT, ROOT / "engines")
    mesh.start()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("old", OLD_COMMITS)
def test_no_request_fails_while_three_nodes_are_upgraded(old: str, tmp_path: Path) -> None:
    site = wheel_of(OLD_COMMITS[old], tmp_path)
    mesh = FaultMesh(tmp_path)
    try:
        for _ in range(3):
            use(mesh.add("--api-port", str(API_PORT), engine=DETERMINISTIC), site)
        mesh.start()
        mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S / 4)
        mesh.place(mesh.nodes)
        before = {node.api.get("/version")["protocol"] for node in mesh.nodes}
        since = time.time()
        clients = KeyedClients(lambda: [node.url for node in mesh.nodes], STREAMS, seed=1)
        clients.await_answers(STREAMS)
        for number, node in enumerate(mesh.nodes, 1):
            upgrade(mesh, node)
            clients.await_answers(STREAMS)
            if number < len(mesh.nodes):
                ring = mixed_ring(mesh, node)
                assert {stage["peer"] for stage in ring["stages"]} == {one.id for one in mesh.nodes}
                clients.await_answers(2 * STREAMS)
        clients.stop()
        assert {node.api.get("/version")["protocol"] for node in mesh.nodes} == {PROTOCOL_VERSION}
        check_all(mesh, [], since, visible=False)
    finally:
        mesh.close()
    longest_s = max(answer.seconds for answer in clients.answers)
    note = f"from protocol {before}: {len(clients.answers)} answers of {STREAMS} clients, {dict(clients.troubles)}"
    test = "test_rolling_upgrade.py::test_no_request_fails_while_three_nodes_are_upgraded"
    keep(Row("F25", f"three nodes upgraded one by one from {old}", test, None, longest_s, None, 0, note))


def mixed_ring(mesh: FaultMesh, at: Node) -> dict[str, object]:
    """Place one more ring of the model, over all nodes, whatever they run."""
    pins = {node.id: [start, stop] for node, (start, stop) in zip(mesh.nodes, [(0, 3), (3, 5), (5, 8)], strict=True)}
    instance: dict[str, object] = at.api.post("/instance", {"model": "exo-mesh-demo", "pins": pins}, 120)
    return instance
