"""The scripts against real nodes on the loopback, and over a real OpenSSH server."""

from __future__ import annotations

import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from exo_mesh import __version__
from tests.scripts.test_scripts import ROOT, called
from tests.support.peers import Peer, mesh
from tests.support.processes import eventually
from tests.support.sshd import ssh_server

pytestmark = pytest.mark.extended

ALONE = ["--host", "127.0.0.1", "--grpc-port", "0", "--api-port", "0", "--discovery", "none", "--engine", "numpy"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    with mesh(tmp_path_factory.mktemp("pair"), [[], []], engine="numpy") as peers:
        yield peers


def test_two_nodes_are_shown_side_by_side(pair: list[Peer], tmp_path: Path) -> None:
    done = called("cluster_info.sh", *(peer.url for peer in pair), home=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["node"] == ["peer-0", "peer-1"] and rows["version"] == [__version__] * 2
    assert rows["health"] == ["ok", "ok"] and len(set(rows["view"])) == 1


def test_the_members_that_a_node_knows_are_asked_by_themselves(pair: list[Peer], tmp_path: Path) -> None:
    done = called("cluster_info.sh", home=tmp_path, EXO_MESH_API_URL=pair[0].url)
    assert done.returncode == 0 and "peer-0" in done.stdout and "peer-1" in done.stdout, done.stderr


def test_a_node_that_does_not_answer_is_counted(pair: list[Peer], tmp_path: Path) -> None:
    done = called("cluster_info.sh", pair[0].url, "http://127.0.0.1:9", home=tmp_path)
    assert done.returncode == 1 and "1 of 2 nodes did not answer" in done.stderr and "peer-0" in done.stdout


def test_a_mesh_of_two_is_verified_and_a_node_that_is_gone_is_named(pair: list[Peer], tmp_path: Path) -> None:
    done = called("verify_cluster.sh", *(peer.url for peer in pair), home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 5 and "one view of the mesh" in done.stdout
    gone = called("verify_cluster.sh", pair[0].url, "http://127.0.0.1:9", home=tmp_path)
    assert gone.returncode == 1 and "FAIL  http://127.0.0.1:9" in gone.stdout


def test_a_server_is_started_once_and_stopped(tmp_path: Path) -> None:
    home = tmp_path / "node"
    flags = ["--home", str(home), "--model", "exo-mesh-demo", "--", *ALONE]
    assert (started := called("run_server.sh", *flags, home=tmp_path)).returncode == 0, started.stderr
    try:
        assert "ready: http://127.0.0.1:" in started.stderr
        again = called("run_server.sh", *flags, home=tmp_path)
        assert again.returncode == 1 and "stop_server.sh ends them" in again.stderr
    finally:
        stopped = called("stop_server.sh", "--home", str(home), home=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert not processes_of(home)


def test_a_server_that_hangs_is_ended_and_others_are_left_alone(pair: list[Peer], tmp_path: Path) -> None:
    home = tmp_path / "node"
    started = called("run_server.sh", "--home", str(home), "--", *ALONE, home=tmp_path)
    assert started.returncode == 0, started.stderr
    (node,) = [process for process in processes_of(home) if "serve" in process.cmdline()]
    node.send_signal(signal.SIGSTOP)
    stopped = called("stop_server.sh", "--home", str(home), "--now", "--grace", "0", home=tmp_path)
    assert stopped.returncode == 0 and "killed" in stopped.stdout, stopped.stdout + stopped.stderr
    assert eventually(lambda: not processes_of(home), 3)
    assert all(peer.child.alive for peer in pair)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused = called("run_server.sh", "--model", str(tmp_path / "empty"), "--home", str(tmp_path / "n"), home=tmp_path)
    assert refused.returncode == 1 and "has no config.json" in refused.stderr


def test_two_ranks_compute_right_results_in_a_sweep_of_sizes(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    argv = ["--ranks", "2", "--sizes", "4K,1M", "--seconds", "0.1", "--no-stress"]
    done = called("rdma_test.sh", *argv, home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, ring (TCP): all results right" in done.stdout
    assert "GB/s peak" in done.stdout and "1.0 MB" in done.stdout


def processes_of(home: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(home) in (process.info["cmdline"] or ()) and process.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture
def remote_home(tmp_path: Path) -> Path:
    home = tmp_path / "remote"
    home.mkdir()
    return home


def remote_environ(home: Path) -> dict[str, str]:
    """The other machine is this one with another home and the libraries of the test, so nothing is downloaded. Its
    PYTHONPATH shows pip another exo-mesh of this version."""
    copy = home / "other" / f"exo_mesh-{__version__}.dist-info"
    copy.mkdir(parents=True)
    (copy / "METADATA").write_text(f"Metadata-Version: 2.1\nName: exo-mesh\nVersion: {__version__}\n")
    return {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": f"{copy.parent}:{sysconfig.get_paths()['purelib']}",
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
    }


def test_a_machine_is_checked_and_compared_over_ssh(tmp_path: Path, remote_home: Path) -> None:
    tool = remote_home / ".local" / "bin" / "exo-mesh"
    tool.parent.mkdir(parents=True)
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'engines')]!r}; from exo_mesh.cli.main import main"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}; sys.exit(main())" "$@"\n')
    tool.chmod(0o700)
    with ssh_server(tmp_path, remote_environ(remote_home)) as ssh:
        same = called("sync_nodes.sh", "--check", "127.0.0.1", home=tmp_path, ssh=ssh)
        tool.write_text(tool.read_text().replace("exit(main())", "exit(9)"))
        missing = called("sync_nodes.sh", "--check", "127.0.0.1", home=tmp_path, ssh=ssh)
        verified = called("verify_cluster.sh", "127.0.0.1", home=tmp_path, ssh=ssh)
    assert same.returncode == 0 and "all hosts have the same version" in same.stderr, same.stderr
    assert missing.returncode == 1 and "not installed" in missing.stdout, missing.stderr
    assert "ok    127.0.0.1                      reachable over SSH" in verified.stdout, verified.stdout
    assert "FAIL  127.0.0.1                      exo-mesh installed" in verified.stdout and verified.returncode == 1


@pytest.mark.slow
def test_another_machine_is_installed_over_ssh(tmp_path: Path, remote_home: Path) -> None:
    with ssh_server(tmp_path, remote_environ(remote_home)) as ssh:
        nothing_fetched = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
        argv = ["--extras", "none", "127.0.0.1"]
        installed = called("bootstrap_node.sh", *argv, home=tmp_path, ssh=ssh, **nothing_fetched)
        assert installed.returncode == 0, installed.stdout + installed.stderr
        verified = called("verify_cluster.sh", "127.0.0.1", home=tmp_path, ssh=ssh)
    assert (remote_home / ".local" / "bin" / "exo-mesh").exists()
    assert f"exo-mesh {__version__}" in installed.stdout
    assert "ok    127.0.0.1                      exo-mesh installed" in verified.stdout, verified.stdout
    assert not list(remote_home.rglob("*.whl")), "the wheel was left on the host"
