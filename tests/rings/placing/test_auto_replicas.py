"""The mesh places a further instance of a model whose requests queue or whose peers drain, and gives it back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.routing import replicas
from exo_mesh.node.node import Node
from exo_mesh.rings.placing import auto_replicas, unloading
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, instances, mesh, tokens, until

SLOW = {"cost_ms": "10"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "QUEUE_S", 0.2)
    monkeypatch.setattr(replicas, "IDLE_S", 0.5)
    monkeypatch.setattr(replicas, "FIRST_RETRY_S", 0.5)
    monkeypatch.setattr(replicas, "LEAVING_S", 0.2)
    monkeypatch.setattr(auto_replicas, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(unloading, "DRAINING_IDLE_S", 0.2)


@contextlib.asynccontextmanager
async def load(node: Node, requests: int) -> AsyncIterator[None]:
    """So many requests of which each is followed by another one."""

    async def ask(number: int) -> None:
        for turn in range(1000):
            await tokens(node, a_request(f"r{number}-{turn}", 60))

    running = [asyncio.create_task(ask(number)) for number in range(requests)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), "no request failed"


def ready(node: Node) -> dict[str, bool]:
    """Ready instances by id: whether the mesh placed them by itself."""
    return {one.id: one.automatic for one in instances(node) if one.state == "ready"}


def serving(node: Node) -> set[str]:
    return set(node._serving.journal.outstanding())


ON: dict[str, Any] = {"engine_options": SLOW, "max_batch_size": 1, "auto_replicas": "on"}


@pytest.mark.extended
async def test_one_more_instance_serves_the_queue_and_is_given_back_after_it(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, **ON) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL))
        async with load(nodes[0], 2):
            await until(lambda: ready(nodes[1]) == {f"{MODEL}-1": False, f"{MODEL}-2": True})
            await until(lambda: serving(nodes[0]) == {f"{MODEL}-1", f"{MODEL}-2"})
        await until(lambda: ready(nodes[0]) == {f"{MODEL}-1": False})
        assert await tokens(nodes[0], a_request("after")), "the last one is never given back"


@pytest.mark.extended
async def test_an_automatic_instance_stays_once_somebody_asks_for_it(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, **ON) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL))
        async with load(nodes[0], 2):
            await until(lambda: len(ready(nodes[0])) == 2)
            made = await nodes[1].instances.create_replicas(InstanceSpec(MODEL), 2)
            assert {one.id for one in made} == {f"{MODEL}-1", f"{MODEL}-2"}
            owned = nodes[0]._owning.owned_rings
            await until(lambda: owned.unused.is_kept(f"{MODEL}-2"))
        follower = nodes[0]._owning.auto_replicas
        assert follower is not None
        assert follower._use(MODEL, nodes[0].membership.telemetry).last_auto is None


@pytest.mark.extended
async def test_a_peer_that_drains_gets_no_further_instance_and_no_request_while_another_one_serves(
    tmp_path: Path,
) -> None:
    async with mesh(tmp_path, 2, **ON) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL))
        nodes[1].peers.drain_here(on=True)
        await until(lambda: nodes[0].membership.telemetry[nodes[1].node_id].is_draining)
        async with load(nodes[0], 3):
            policies = nodes[0]._owning.auto_replicas
            assert policies is not None
            await until(lambda: any(one._not_before > 0 for one in policies._policies.values()))
            assert list(ready(nodes[0])) == [f"{MODEL}-1"]
            nodes[1].peers.drain_here(on=False)
            await until(lambda: len(ready(nodes[0])) == 2)
            nodes[1].peers.drain_here(on=True)
            await until(lambda: nodes[0].membership.telemetry[nodes[1].node_id].is_draining)
            await until(lambda: serving(nodes[0]) == {f"{MODEL}-1"})


@pytest.mark.extended
async def test_a_drain_ends_although_requests_at_other_peers_never_do(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, auto_replicas="on", engine_options=SLOW) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, exclude_peers=(nodes[0].node_id,)))
        async with load(nodes[0], 2):
            await until(lambda: nodes[1].observation.drain_state()["sequences"] > 0)
            nodes[1].peers.drain_here(on=True)
            await until(lambda: nodes[1].observation.drain_state()["drained"])
            await until(
                lambda: [stage.peer for one in instances(nodes[1]) for stage in one.stages] == [nodes[0].node_id]
            )


@pytest.mark.extended
async def test_no_instance_takes_more_than_half_of_the_free_memory_by_itself(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, usable_bytes=(8 * 10**9, 500 * 10**6), **ON) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL))
        async with load(nodes[0], 2):
            policies = nodes[0]._owning.auto_replicas
            assert policies is not None
            await until(lambda: any(one._not_before > 0 for one in policies._policies.values()))
            assert list(ready(nodes[0])) == [f"{MODEL}-1"]


@pytest.mark.extended
async def test_a_recovered_instance_is_still_automatic(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, **ON) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL))
        async with load(nodes[0], 3):
            await until(lambda: len(ready(nodes[0])) == 2)
            (automatic,) = [one for one in instances(nodes[0]) if one.automatic]
            os.kill(automatic.stages[0].pid, signal.SIGKILL)

            def is_back() -> bool:
                found = [one for one in instances(nodes[0]) if one.id == automatic.id]
                return any(one.state == "ready" and one.ballot > automatic.ballot for one in found)

            await until(is_back)
            assert ready(nodes[0])[automatic.id]
