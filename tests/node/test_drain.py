"""A node that finishes what it has and takes nothing new."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from exo_mesh.base.telemetry.log_ring import RECENT
from exo_mesh.errors import NotReadyError
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, collect, mesh, tokens, until


@pytest.mark.extended
async def test_what_runs_is_finished_and_the_rest_goes_elsewhere(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options={"cost_ms": "10"}) as nodes:
        leaving, staying = nodes
        await leaving.instances.create(InstanceSpec(MODEL, min_peers=2))
        whole = await tokens(leaving, a_request("before", 12))
        got: list[int] = []
        running = asyncio.create_task(collect(leaving, "running", 12, got))
        await until(lambda: len(got) > 2)
        leaving.peers.drain_here(on=True)
        assert (
            leaving.observation.drain_state()["drained"] is False and leaving.observation.health().status == "draining"
        )
        with pytest.raises(NotReadyError, match="send the request to another peer"):
            await tokens(leaving, a_request("late"))
        async with asyncio.timeout(20):
            await running
        assert got == whole
        await until(lambda: leaving.observation.drain_state()["drained"])
        await until(lambda: staying.membership.telemetry[leaving.node_id].usable_bytes == 0)
        placed = await staying.instances.create(InstanceSpec(MODEL, exclude_peers=(leaving.node_id,)))
        assert {stage.peer for stage in placed.stages} == {staying.node_id}
        leaving.peers.drain_here(on=False)
        assert await tokens(leaving, a_request("again", 12)) == whole


@pytest.mark.extended
async def test_any_node_drains_another_and_reads_its_log(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, open_admin=True) as (asked, other):
        RECENT.add(logging.LogRecord("exo_mesh.test", logging.WARNING, __file__, 1, "a \x1b[31m line", (), None))
        assert await asked.peers.drain(other.node_id, on=True) == other.node_id
        assert other.observation.drain_state()["draining"] and not asked.observation.drain_state()["draining"]
        await until(lambda: asked.membership.telemetry[other.node_id].is_draining)
        log = await asked.peers.log(other.settings.name, 500)
        assert log is not None and "a \N{REPLACEMENT CHARACTER}[31m line" in {line["message"] for line in log}
        assert await asked.peers.drain(other.node_id, on=False) == other.node_id
        await until(lambda: not asked.membership.telemetry[other.node_id].is_draining)
