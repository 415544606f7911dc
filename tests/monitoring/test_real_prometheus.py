"""A real Prometheus finds a real mesh by itself, and under load every query of every dashboard returns a series."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.errors import MeshError
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.dashboards import MONITORING, filled_in, targets
from tests.support.hub import LoopbackHub
from tests.support.peers import Peer, mesh
from tests.support.processes import eventually
from tests.support.prometheus import Prometheus, configuration, node_exporter, running
from tests.support.recorded import machine_that_draws

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="process and node_exporter metrics are Linux's"),
]

GROUP = ["--group-backend", "ring", "--open-admin"]
SLOW = ["--engine-option", "cost_ms=5", "--engine-option", "reduce_ms=0.1"]
WINDOW = "30s"
"""What $__rate_interval is here: longer than the test."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A hub with two small models for the nodes of this test."""
    with LoopbackHub() as hub:
        for name in ("test/tiny", "test/broken"):
            hub.add(name, write_checkpoint(tmp_path / name, TinyModel("llama", layers=4, hidden=128)))
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        yield hub


def ask(peer: Peer) -> int:
    reply = peer.chat("Count from 3 to 60.", max_tokens=60, ignore_eos=True, n=2)
    tokens: int = reply["usage"]["completion_tokens"]
    return tokens


def download(peer: Peer, model: str, end: str) -> None:
    """Fetch a model from the hub; the download ends as expected."""

    def states() -> list[str]:
        downloads = peer.api.get("/v1/download/progress")["data"]
        return [each["state"] for each in downloads if each["model"] == model]

    peer.api.post("/download/start", {"model": model})
    assert eventually(lambda: states() == [end], 20), states()


def work_for_a_tensor_group(peers: list[Peer], server: Prometheus) -> set[str]:
    """Requests to a ring whose first stage is a tensor group. Returns the queries that are silent meanwhile."""
    entry, leader, other = peers
    group = {"peer": leader.id, "layers": [0, 4], "group": {"peers": [leader.id, other.id]}}
    instance = entry.place(stages=[group, {"peer": entry.id, "layers": [4, 8]}])
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, peers)) == [120] * 3
        assert eventually(lambda: bool(server.query("exo_mesh_group_all_reduce_seconds")), 10)
        found = silent(server)
        assert eventually(entry.idle, 30)
        cut_off = pool.submit(entry.chat, "Count from 3 to 60.", max_tokens=1000, ignore_eos=True)
        assert eventually(entry.busy, 30)
        entry.api.delete(f"/instance/{instance['id']}")
        with pytest.raises(MeshError, match="deleted"):
            cut_off.result(60)
    return found


def work_through_a_loss(peers: list[Peer]) -> None:
    """Requests to a plain ring; one of its runners is killed while they run."""
    entry, second, _ = peers
    entry.place(pins={entry.id: [0, 4], second.id: [4, 8]})
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, peer) for peer in peers * 2]
        assert eventually(second.busy, 30)
        os.kill(second.runners()[0].pid, signal.SIGKILL)
        assert [answer.result(60) for answer in answers] == [120] * 6


NO_BOARD = "exo_mesh_rkllm_server_up"
"""A metric without a series here: no node of this test has a board."""


def silent(prometheus: Prometheus) -> set[str]:
    """Queries without a series now. What stands after `or vector(0)` is left out: that always returns one."""
    found = set()
    for target in targets():
        if NO_BOARD in target.expr:
            continue
        expr = filled_in(target.expr, WINDOW).replace(" or vector(0)", "")
        if not prometheus.query(expr):
            found.add(target.name)
    return found


def test_prometheus_finds_all_nodes_and_every_query_of_every_dashboard_returns_a_series(
    tmp_path: Path, prometheus: str, exporter: str, hub: LoopbackHub
) -> None:
    port = free_port()
    with ExitStack() as stack:
        hardware = ["--sysfs", str(stack.enter_context(machine_that_draws(tmp_path / "sys", 40.0)))]
        peers = stack.enter_context(mesh(tmp_path, [[*GROUP, *SLOW, *hardware]] * 3, engine="dummy"))
        stack.enter_context(node_exporter(exporter, port))
        config = configuration([peers[0].url, peers[1].url], port)
        server = stack.enter_context(running(prometheus, tmp_path, config))
        download(peers[0], "test/tiny", "completed")
        hub.faults.corrupt = {"model.safetensors": 1000}
        download(peers[0], "test/broken", "failed")
        assert_targets(server, peers)
        of_groups = work_for_a_tensor_group(peers, server)
        work_through_a_loss(peers)
        # energy is divided over whole windows of 2 s, so there must be work for a while
        known = "exo_mesh_ring_energy_joules_total"
        assert eventually(lambda: ask(peers[0]) == 120 and bool(server.query(known)), 30)
        peers[2].child.stop()
        assert eventually(lambda: ask(peers[0]) == 120 and not silent(server) & of_groups, 20), (
            silent(server) & of_groups
        )
        assert [name for name in recorded() if not server.query(name)] == []
        gone = peers[2].url.removeprefix("http://")
        pending = 'ALERTS{alertname="ExoMeshNodeDown"}'
        assert eventually(lambda: [one["metric"]["instance"] for one in server.query(pending)] == [gone], 20)


def recorded() -> list[str]:
    """The names of the recording rules."""
    text = (MONITORING / "prometheus" / "rules" / "recording.yml").read_text()
    return [rule["record"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def assert_targets(server: Prometheus, peers: list[Peer]) -> None:
    """Each node is scraped once, though two nodes list it, and its machine has the same `instance`."""
    addresses = sorted(peer.url + "/metrics" for peer in peers)
    assert eventually(lambda: [one["scrapeUrl"] for one in server.targets("exo-mesh")] == addresses, 20)
    labels = [one["labels"] for one in server.targets("exo-mesh")]
    assert {each["node"] for each in labels} == {peer.child.log_path.parent.name for peer in peers}
    assert {one["labels"]["instance"] for one in server.targets("node")} == {each["instance"] for each in labels}
