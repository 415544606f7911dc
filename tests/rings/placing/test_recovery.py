"""A ring that loses stages goes on: survivors keep their processes, the fewest bytes are read, no token is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.domain.request import TokenEvent
from exo_mesh.errors import PlacementError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing import instances as node_instances
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, Machine, a_request, instances, make_node, mesh, tokens, until

SLOW = {"cost_ms": "10"}
THREE = tuple(Pin(f"n{index}", *layers) for index, layers in enumerate(((0, 3), (3, 5), (5, 8))))
MB = 10**6


class Reading:
    """A request that is being answered. `tokens` has what came so far; await `task` for the end."""

    def __init__(self, node: Node, request_id: str, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.progress: list[str] = []
        self.task = asyncio.create_task(self._read(node, request_id, max_tokens))

    async def _read(self, node: Node, request_id: str, max_tokens: int) -> list[int]:
        async with aclosing(node.requests.generate(MODEL, a_request(request_id, max_tokens))) as items:
            async for item in items:
                if not isinstance(item, TokenEvent):
                    self.progress.append(item.phase)
                elif item.token_id is not None:
                    self.tokens.append(item.token_id)
        return self.tokens


def pids(instance: InstanceReport) -> dict[str, int]:
    return {stage.peer: stage.pid for stage in instance.stages}


def ready(node: Node) -> list[InstanceReport]:
    return [one for one in instances(node) if one.state == "ready"]


def counted(node: Node, name: str, **labels: str) -> float:
    """The sum of the series of a metric that have these labels."""
    samples = (sample for family in node.metrics.registry.collect() for sample in family.samples)
    wanted = labels.items()
    return sum(one.value for one in samples if one.name == f"exo_mesh_{name}" and wanted <= one.labels.items())


def computed_by(node: Node, request_id: str) -> list[list[tuple[str, bool]]]:
    """The name of each stage of each ring that computed a request, and whether it took its layers over then."""
    found = node.observation.answered(request_id)
    assert found is not None
    legs = found.legs.describe()
    assert all(leg["pause_s"] > 0 and leg["from_token"] > 5 for leg in legs[1:])
    return [[(stage["names"][0], stage["is_new"]) for stage in leg["stages"]] for leg in legs]


async def crash(node: Node, instance: InstanceReport) -> None:
    """What SIGKILL does to a node: its control plane is gone at once, and its runner with it."""
    os.kill(pids(instance)[node.node_id], signal.SIGKILL)
    await node._server.stop(0)
    await node.membership._tasks.close()
    for keeper in node._owning.owned_rings.monitors.values():
        await keeper.close()
    node._owning.owned_rings.monitors.clear()
    await node._owning.owned_rings._tasks.close()
    await node._hosting.host._tasks.close()


@pytest.mark.parametrize(
    "lost",
    [pytest.param(0, marks=pytest.mark.extended), pytest.param(1, marks=pytest.mark.slow), 2],
)
async def test_a_killed_runner_is_started_again_in_its_place_and_the_others_keep_theirs(
    tmp_path: Path, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with mesh(tmp_path, 3, engine_options=SLOW) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=THREE))
        expected = await tokens(nodes[1], a_request("undisturbed", 18))
        reading = Reading(nodes[1], "disturbed", 18)
        await until(lambda: len(reading.tokens) > 5)
        os.kill(placed.stages[lost].pid, signal.SIGKILL)
        assert await asyncio.wait_for(reading.task, 20) == expected
        await until(lambda: ready(nodes[1]) and ready(nodes[1])[0].ballot != placed.ballot)
        (after,) = ready(nodes[1])
        kept = {stage.peer for index, stage in enumerate(placed.stages) if index != lost}
        assert {peer: pids(after)[peer] for peer in kept} == {peer: pids(placed)[peer] for peer in kept}
        assert [stage.layers for stage in after.stages] == [stage.layers for stage in placed.stages]
        assert counted(nodes[1], "requests_resumed_total") == 1
        card = nodes[0]._models.catalogue.known_card(MODEL)
        assert counted(nodes[0], "recovery_loaded_bytes_total") == card.shard_bytes(*placed.stages[lost].layers)
        assert counted(nodes[0], "recoveries_total", cause="stage_lost", outcome="ready") == 1
        restarted = next(node for node in nodes if node.node_id == placed.stages[lost].peer)
        assert counted(restarted, "runner_restarts_total", model=MODEL) == 1
        assert counted(restarted, "runner_ends_total", end="crashed") == 1
        assert computed_by(nodes[1], "undisturbed") == [[(f"n{n}", False) for n in range(3)]]
        legs = [[(f"n{n}", False) for n in range(3)], [(f"n{n}", n == lost) for n in range(3)]]
        assert computed_by(nodes[1], "disturbed") == legs, "the entry peer tells which stage was started again"
        assert len(await tokens(nodes[2], a_request("next"))) == 12
    (line,) = [line for line in caplog.messages if "recovered by ballot" in line]
    assert "loaded " in line and " 0 request" not in line, "a request that is sent again is not kept in the ring"


async def test_while_a_ring_recovers_its_context_limit_stands_and_its_model_counts_as_loaded(tmp_path: Path) -> None:
    """A new request waits for that ring: it must neither get the limit of a ring yet to be placed nor another model."""
    async with mesh(tmp_path, 1, engine_options={"load_ms": "300"}) as (node,):
        placed = await node.instances.create(InstanceSpec(MODEL, context_limit=256))
        assert await node.instances.context_limit(MODEL) == 256 and not (await node.models.named(MODEL)).is_loading
        os.kill(placed.stages[0].pid, signal.SIGKILL)
        await until(lambda: not ready(node))
        entry = await node.models.named(MODEL)
        assert entry.is_loading and not entry.instance_ids
        assert await node.instances.context_limit(MODEL) == 256
        await until(lambda: ready(node))
        assert ready(node)[0].ballot != placed.ballot


@pytest.mark.extended
async def test_a_spare_takes_the_layers_of_a_dead_peer_and_nobody_else_loads(tmp_path: Path) -> None:
    async with mesh(tmp_path, 4, engine_options=SLOW) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=THREE))
        expected = await tokens(nodes[0], a_request("undisturbed", 80))
        reading = Reading(nodes[0], "disturbed", 80)
        await until(lambda: len(reading.tokens) > 10)
        await crash(nodes[1], placed)
        assert await asyncio.wait_for(reading.task, 20) == expected
        (after,) = ready(nodes[0])
        assert [stage.peer for stage in after.stages] == [nodes[n].node_id for n in (0, 3, 2)]
        assert computed_by(nodes[0], "disturbed") == [
            [("n0", False), ("n1", False), ("n2", False)],
            [("n0", False), ("n3", True), ("n2", False)],
        ]
        assert pids(after)[nodes[0].node_id] == pids(placed)[nodes[0].node_id]
        assert pids(after)[nodes[2].node_id] == pids(placed)[nodes[2].node_id]
        lost = nodes[0]._models.catalogue.known_card(MODEL).shard_bytes(*placed.stages[1].layers)
        assert counted(nodes[0], "recovery_loaded_bytes_total") == lost


@pytest.mark.slow
async def test_neighbours_absorb_a_dead_owner_and_the_lowest_member_owns_what_is_left(tmp_path: Path) -> None:
    async with mesh(tmp_path, 4, engine_options=SLOW, usable_bytes=(1000 * MB,) * 3 + (MB,)) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=THREE))
        await until(lambda: ready(nodes[3]))
        expected = await tokens(nodes[3], a_request("undisturbed", 80))
        reading = Reading(nodes[3], "disturbed", 80)
        await until(lambda: len(reading.tokens) > 10)
        await crash(nodes[0], placed)
        assert await asyncio.wait_for(reading.task, 25) == expected
        taken = [counted(node, "recoveries_total", cause="owner_lost", outcome="ready") for node in nodes[1:]]
        assert sum(taken) == 1
        await until(lambda: len(ready(nodes[3])) == 1 and len(ready(nodes[3])[0].stages) == 2)
        (after,) = ready(nodes[3])
        assert pids(after)[nodes[2].node_id] == pids(placed)[nodes[2].node_id], "its layers are the same"
        assert after.owner in (nodes[1].node_id, nodes[2].node_id, nodes[3].node_id)


@pytest.mark.extended
async def test_sixteen_streams_survive_a_stage_and_none_is_refused(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options={"cost_ms": "3"}, max_queued=4) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=THREE))
        expected = await tokens(nodes[0], a_request("undisturbed", 80))
        readings = [Reading(nodes[n % 3], f"r{n}", 80) for n in range(16)]
        await until(lambda: all(len(one.tokens) > 5 for one in readings))
        os.kill(placed.stages[2].pid, signal.SIGKILL)
        texts = await asyncio.wait_for(asyncio.gather(*(one.task for one in readings)), 40)
        assert texts == [expected] * 16
        assert sum(counted(node, "requests_resumed_total") for node in nodes) == 16


@pytest.mark.slow
async def test_a_node_that_stands_still_while_its_runner_lives_costs_no_token(tmp_path: Path) -> None:
    """The middle one of three; its control plane does not answer, and the mesh holds it for dead."""
    async with mesh(tmp_path, 3, engine_options=SLOW) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=THREE))
        await until(lambda: ready(nodes[2]))
        reading = Reading(nodes[0], "r", 300)
        await until(lambda: len(reading.tokens) > 10)
        await nodes[1]._server.stop(0)
        await nodes[1].membership._tasks.close()
        await until(lambda: not nodes[0].membership.is_alive(nodes[1].node_id))
        await asyncio.sleep(5)  # longer than a silent stage is asked again
        assert len(await tokens(nodes[2], a_request("another"))) == 12, "new requests use the ring, too"
        assert len(await asyncio.wait_for(reading.task, 30)) == 300
        (after,) = ready(nodes[0])
        assert (after.ballot, pids(after)) == (placed.ballot, pids(placed))
        assert "recovering" not in reading.progress and counted(nodes[0], "requests_resumed_total") == 0


@pytest.mark.extended
async def test_when_nobody_can_hold_the_model_requests_end_with_the_numbers_until_a_peer_returns(
    tmp_path: Path,
) -> None:
    sizes = (MB, 400 * MB)
    async with mesh(tmp_path, 2, engine_options=SLOW, usable_bytes=sizes) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL))
        assert [stage.peer for stage in placed.stages] == [nodes[1].node_id]
        reading = Reading(nodes[0], "r", 800)
        await until(lambda: len(reading.tokens) > 10)
        await crash(nodes[1], placed)
        with pytest.raises(PlacementError) as refused:
            await asyncio.wait_for(reading.task, 10)
        assert refused.value.need_bytes and refused.value.need_bytes > 280 * MB
        assert re.search(r"needs .* there is ", str(refused.value))
        await until(lambda: not instances(nodes[0]))
        bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",)
        returned = make_node(tmp_path / "n2", "n2", Machine(400 * MB), bootstrap_peers=bootstrap, engine_options=SLOW)
        await returned.start()
        try:
            await until(lambda: nodes[0].membership.is_alive(returned.node_id))
            await until(lambda: returned.node_id in nodes[0].membership.telemetry)
            assert len(await tokens(nodes[0], a_request("next"))) == 12
        finally:
            await returned.stop()


@pytest.mark.slow
async def test_an_instance_that_is_being_recovered_can_be_deleted(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options={"load_ms": "3000"}) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        os.kill(placed.stages[1].pid, signal.SIGKILL)
        await until(lambda: [one.state for one in instances(nodes[1])] == ["loading"])
        assert await nodes[1].instances.delete(placed.id)
        await until(lambda: not any(instances(node) for node in nodes))
        assert all(node._hosting.host.memory.reserved_bytes == 0 for node in nodes)


@pytest.mark.slow
async def test_a_hop_that_is_lost_between_two_that_live_is_made_anew_and_nothing_is_loaded(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=THREE))
        expected = await tokens(nodes[1], a_request("undisturbed", 60))
        reading = Reading(nodes[1], "disturbed", 60)
        await until(lambda: len(reading.tokens) > 10)
        runner = nodes[0]._hosting.host._runners[placed.id]
        nodes[0]._hosting.host._hops.forget(placed.id, runner)
        await runner.link("127.0.0.1:1")
        assert await asyncio.wait_for(reading.task, 30) == expected
        (after,) = ready(nodes[1])
        assert after.ballot > placed.ballot and pids(after) == pids(placed)
        assert counted(nodes[0], "recovery_loaded_bytes_total") == 0
        assert counted(nodes[0], "recoveries_total", cause="hop_lost", outcome="ready") == 1


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1], ids=["owner", "member"])
async def test_a_node_that_stops_leaves_its_rings_to_the_others(tmp_path: Path, stopped: int) -> None:
    async with mesh(tmp_path, 4, engine_options=SLOW) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=THREE))
        await until(lambda: ready(nodes[3]))
        expected = await tokens(nodes[3], a_request("undisturbed", 60))
        reading = Reading(nodes[3], "disturbed", 60)
        await until(lambda: len(reading.tokens) > 10)
        await nodes[stopped].stop()
        assert await asyncio.wait_for(reading.task, 30) == expected
        (after,) = ready(nodes[3])
        ring = [nodes[3 if n == stopped else n].node_id for n in range(3)]
        assert [stage.peer for stage in after.stages] == ring
        kept = {peer: pid for peer, pid in pids(placed).items() if peer != nodes[stopped].node_id}
        assert {peer: pids(after)[peer] for peer in kept} == kept


@pytest.mark.parametrize(
    "asking", [pytest.param(0, id="its owner", marks=pytest.mark.extended), pytest.param(1, id="another peer")]
)
async def test_a_ring_that_failed_a_request_and_that_nobody_mends_is_made_anew_of_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asking: int
) -> None:
    monkeypatch.setattr(node_instances, "OWNER_S", 0.2)
    async with mesh(tmp_path, 2) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: ready(nodes[asking]))
        (instance,) = nodes[asking]._owning.instances.of_model(MODEL)
        nodes[asking]._owning.instances.distrust(instance)
        assert len(await tokens(nodes[asking], a_request())) == 12
        await until(lambda: len(ready(nodes[0])) == 1 and ready(nodes[0])[0].ballot != placed.ballot)
        (after,) = ready(nodes[0])
        assert after.owner == nodes[asking].node_id and pids(after) == pids(placed)
        await until(lambda: sum(len(node._owning.owned_rings.monitors) for node in nodes) == 1)
