"""What nodes tell of themselves when something went wrong, and of those that do not answer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.health import HealthLevel
from exo_mesh.domain.reports import PeerHealth, ReasonReport
from exo_mesh.errors import UnknownPeerError
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, crash, instances, mesh, tokens, until


def phases(runner: dict[str, Any]) -> list[str]:
    return [entry["phase"] for entry in runner["phases"]]


async def test_the_phases_of_a_killed_runner_outlive_it_and_are_told_to_the_whole_mesh(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options={"cost_ms": "5"}) as nodes:
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: instances(nodes[1]))
        await tokens(nodes[1], a_request(prompt=(77, 78, 79)))
        victim = next(node for node in nodes if node.node_id == instance.stages[1].peer)
        log = victim._hosting.runner_history.flights.logs[0]
        await until(lambda: any("decode" in entry["phase"] for entry in log.describe()))
        os.kill(instance.stages[1].pid, signal.SIGKILL)
        await until(lambda: log.ended)
        (runner,) = victim.inspection.diagnostics.timeline()["runners"]
        assert phases(runner)[:2] == ["spawned", "first report"] and phases(runner)[-2:] == ["end", "exit"]
        assert {"loading", "listening", "ready", "linked"} <= set(phases(runner))
        assert "SIGKILL" in runner["phases"][-2]["detail"] and runner["ended"]
        for node in nodes:
            merged = await node.inspection.diagnostics.cluster_timeline()
            times = [entry["at"] for entry in merged["entries"]]
            assert times == sorted(times) and merged["unreachable"] == []
            assert {entry["node"] for entry in merged["entries"]} == {one.node_id for one in nodes}
        whole = await nodes[1].inspection.diagnostics.cluster()
        assert {one["node_id"] for one in whole["nodes"]} == {node.node_id for node in nodes}
        assert all(one["processes"] and one["resources"]["disk"]["free_bytes"] for one in whole["nodes"])
        assert "77, 78, 79" not in json.dumps(whole), "no prompt, not even as ids"


@pytest.mark.extended
async def test_a_node_that_does_not_answer_is_named(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        await crash(nodes[1])
        whole = await nodes[0].inspection.diagnostics.cluster()
        assert [one["node_id"] for one in whole["nodes"]] == [nodes[0].node_id]
        assert [one["id"] for one in whole["unreachable"]] == [nodes[1].node_id]
        await until(lambda: not nodes[0].membership.peers)
        assert (await nodes[0].inspection.diagnostics.cluster_timeline())["unreachable"][0]["why"].startswith(
            "no answer for"
        )
        shown = {one.id: one for one in nodes[0].observation.health().peer_health}
        assert shown[nodes[1].node_id].level == "failed"
        assert shown[nodes[1].node_id].reasons[0].code == "unreachable"
        with pytest.raises(UnknownPeerError):
            await nodes[0].inspection.diagnostics.of(nodes[1].node_id)
        own = await nodes[0].inspection.diagnostics.of(nodes[0].node_id[:6])
        assert own["node_id"] == nodes[0].node_id


async def test_a_peer_hears_what_is_wrong_with_another(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        nodes[0]._parts.health.note("no_engine", "no engine can run for --engine none", "pip install one")
        name = nodes[0].node_id

        def told() -> PeerHealth:
            return next(one for one in nodes[1].observation.health().peer_health if one.id == name)

        await until(lambda: told().level == "degraded")
        message, remedy = "no engine can run for --engine none", "pip install one"
        assert told().reasons == [ReasonReport("no_engine", HealthLevel.DEGRADED, message, remedy)]
        assert nodes[1].observation.health().status == "ok", "it is not wrong with this one"
