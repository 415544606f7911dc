"""What the membership believes decides about new plans, not about rings that run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from exo_mesh.mesh.membership.swim import Life, Swim, SwimState, Update
from exo_mesh.rings.placing import ownership, ring_monitor, ring_use
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, SLOW, Machine, collect, instances, make_node, mesh, until


@pytest.mark.extended
async def test_a_false_verdict_ends_no_healthy_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_monitor, "REATTACH_S", 0.5)
    monkeypatch.setattr(ownership, "ORPHAN_S", 0.5)
    monkeypatch.setattr(ring_use, "TAKE_OVER_S", 60.0)  # from then on the ring of a dead owner goes on without it
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[0], "r", 2000, got))
        await until(lambda: len(got) > 3)
        runners = [dict(node._hosting.host._runners) for node in nodes]
        with monkeypatch.context() as patch:
            patch.setattr(Swim, "is_accused", lambda self, told: False)  # nobody refutes
            for one, other in (nodes, nodes[::-1]):
                for state in (SwimState.SUSPECT, SwimState.DEAD):
                    one.membership._news.learn(Update(other.node_id, state, Life(1, 10**6)), None)
            assert all(node.membership.peers == [] for node in nodes)
            begin, before = time.monotonic(), len(got)
            await until(lambda: time.monotonic() - begin > ring_monitor.REATTACH_S + 2)
            assert len(got) > before + 3 and not request.done(), "the ring goes on"
            assert [node._hosting.host._runners for node in nodes] == runners, "no stage was replaced"
        await until(lambda: all(len(node.membership.peers) == 1 for node in nodes))
        await until(lambda: all(len(instances(node)) == 1 for node in nodes))
        more = len(got)
        await until(lambda: len(got) > more + 3)
        assert await nodes[0].requests.cancel("r")
        await asyncio.gather(request, return_exceptions=True)


async def test_who_was_refused_and_why_is_in_the_topology_of_both_sides(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        address = (f"127.0.0.1:{node.grpc_port}",)
        stranger = make_node(tmp_path / "s", "stranger", Machine(), bootstrap_peers=address, namespace="office")
        await stranger.start()
        try:
            await until(lambda: node.observation.topology().refused and stranger.observation.topology().refused)
            assert "namespace 5cc3f828 is not 37a8eec1" in node.observation.topology().refused[0]
            assert node.membership.peers == [] and stranger.membership.peers == []
        finally:
            await stranger.stop()


async def test_a_peer_that_was_refused_and_then_joins_is_not_told_of_any_more(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        address = (f"127.0.0.1:{node.grpc_port}",)
        for namespace in ("office", "default"):
            other = make_node(tmp_path / "o", "other", Machine(), bootstrap_peers=address, namespace=namespace)
            await other.start()
            try:
                if namespace == "office":
                    await until(lambda: node.observation.health().reasons)
                else:
                    await until(lambda: node.membership.peers)
                    assert node.observation.topology().refused == [] and node.observation.health().status == "ok"
                    assert node.observation.health().reasons == []
            finally:
                await other.stop()
