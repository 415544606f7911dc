"""Models are placed on one, two and three nodes, and every node can generate through the ring."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exo_mesh.api.errors import error_response
from exo_mesh.cli.client.child_node import free_port
from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.errors import InputError, PlacementError, UnknownModelError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import (
    GB,
    MODEL,
    Machine,
    a_request,
    instances,
    make_node,
    mesh,
    runners,
    tokens,
    until,
)

ALL_LAYERS = list(range(8))


def layers_of(instance: InstanceReport) -> list[int]:
    stages = instance.stages
    assert isinstance(stages, list)
    return [layer for stage in stages for layer in range(*stage.layers)]


@pytest.mark.parametrize("count", [*(pytest.param(count, marks=pytest.mark.extended) for count in (1, 2)), 3])
async def test_a_model_runs_on_as_many_nodes_as_asked_and_every_node_is_a_way_in(tmp_path: Path, count: int) -> None:
    async with mesh(tmp_path, count) as nodes:
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=count))
        assert instance.state == "ready" and len(instance.stages) == count
        assert layers_of(instance) == ALL_LAYERS
        await until(lambda: all(instances(node) == [instance] for node in nodes))
        texts = [await tokens(node, a_request(f"r{index}")) for index, node in enumerate(nodes)]
        assert all(text == texts[0] and len(text) == 12 for text in texts)
        assert len({node.observation.state().view.view_digest for node in nodes}) == 1


async def test_the_first_request_places_the_model_on_the_fewest_nodes(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        await tokens(nodes[1], a_request())
        (instance,) = instances(nodes[1])
        assert [stage.peer for stage in instance.stages] == [nodes[1].node_id]


async def test_nodes_find_each_other_by_broadcast(tmp_path: Path) -> None:
    port = free_port()
    async with mesh(tmp_path, 2, discovery=("udp",), listen_port=port, broadcast_port=port) as nodes:
        assert all(len(node.membership.peers) == 1 for node in nodes)


async def test_layers_follow_memory(tmp_path: Path) -> None:
    sizes = (3 * GB, GB)
    async with mesh(tmp_path, 2, usable_bytes=sizes) as nodes:
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        assert [stage.layers for stage in instance.stages] == [(0, 6), (6, 8)]


async def test_two_nodes_that_place_at_once_get_one_instance(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        spec = InstanceSpec(MODEL, min_peers=2)
        placed = await asyncio.gather(*(node.instances.create(spec) for node in nodes))
        assert placed[0].digest == placed[1].digest
        await until(lambda: all(len(instances(node)) == 1 for node in nodes))
        assert await tokens(nodes[0], a_request("a")) == await tokens(nodes[1], a_request("b"))


async def test_requests_that_come_at_once_share_one_placement(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, engine_options={"load_ms": "200"}) as (node,):
        texts = await asyncio.gather(*(tokens(node, a_request(f"r{n}")) for n in range(5)))
        assert len(instances(node)) == 1 and all(text == texts[0] for text in texts)


async def test_asking_again_for_what_there_is_changes_nothing(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        spec = InstanceSpec(MODEL)
        assert await node.instances.create(spec) == await node.instances.create(spec)


async def test_a_wish_that_no_instance_fulfils_makes_a_replica(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        small = await nodes[0].instances.create(InstanceSpec(MODEL))
        wide = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        assert (small.id, wide.id) == ("exo-mesh-demo-1", "exo-mesh-demo-2")
        assert len(wide.stages) == 2


async def test_too_little_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, usable_bytes=(100_000_000, 50_000_000)) as nodes:
        with pytest.raises(PlacementError) as refused:
            await nodes[0].instances.create(InstanceSpec(MODEL))
        text = str(refused.value)
        assert "needs" in text and "100 MB" in text and "50 MB" in text and "Free at least" in text
        assert not instances(nodes[0])


async def test_what_no_set_of_peers_can_ever_hold_is_the_callers_fault(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, max_memory_bytes=100_000_000) as (node,):
        with pytest.raises(PlacementError) as refused:
            await node.instances.create(InstanceSpec(MODEL))
        assert refused.value.code == "no_placement" and error_response(refused.value).status == 400
        assert refused.value.details["need_bytes"] and refused.value.details["have"]


async def test_what_would_fit_if_memory_were_free_is_refused_for_now(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, usable_bytes=(100_000_000,)) as (node,):
        for attempt in (node.instances.create, node.instances.preview):
            with pytest.raises(PlacementError) as refused:
                await attempt(InstanceSpec(MODEL))
            assert refused.value.code == "memory_pressure"
            assert re.search(r"n0 has 20\.\d+ GB, models hold 0 MB, other programs 20\.\d+ GB", str(refused.value))
        reply = error_response(refused.value)
        assert (reply.status, reply.headers["Retry-After"]) == (503, "10")


@pytest.fixture
def hold_figures(monkeypatch: pytest.MonkeyPatch) -> Callable[[Node, Node], asyncio.Event]:
    """Makes the first node forget the figures of the second one and hear no more of them until the event is set."""

    def hold(node: Node, silent: Node) -> asyncio.Event:
        records = node.membership._roster.records
        take, arrived = records.take_reading, asyncio.Event()
        heard = lambda one: take(one) if one.peer_id != silent.node_id or arrived.is_set() else 0  # noqa: E731
        monkeypatch.setattr(records, "take_reading", heard)
        del records.readings[silent.node_id]
        return arrived

    return hold


@pytest.mark.extended
async def test_figures_that_are_still_on_their_way_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold_figures: Callable[[Node, Node], asyncio.Event]
) -> None:
    async with mesh(tmp_path, 2, usable_bytes=(100_000_000, 8 * GB)) as nodes:
        arrived = hold_figures(nodes[0], nodes[1])
        monkeypatch.setattr("exo_mesh.rings.placing.placer.FIGURES_S", 0.3)
        with pytest.raises(PlacementError) as refused:
            await nodes[0].instances.create(InstanceSpec(MODEL))
        assert refused.value.code == "pending" and "n1" in str(refused.value)
        assert error_response(refused.value).status == 503
        monkeypatch.setattr("exo_mesh.rings.placing.placer.FIGURES_S", 15.0)
        placing = asyncio.create_task(nodes[0].instances.create(InstanceSpec(MODEL)))
        await asyncio.wait([placing], timeout=0.5)
        assert not placing.done()
        arrived.set()
        assert [stage.peer for stage in (await placing).stages] == [nodes[1].node_id]


@pytest.mark.extended
async def test_pins_wait_for_the_figures_of_their_peers_and_pins_that_are_wrong_do_not(
    tmp_path: Path, hold_figures: Callable[[Node, Node], asyncio.Event]
) -> None:
    async with mesh(tmp_path, 2) as nodes:
        own, other = (node.node_id for node in nodes)
        with pytest.raises(InputError):
            await nodes[0].instances.create(InstanceSpec(MODEL, pins=(Pin(own, 0, 3), Pin(other, 4, 8))))
        arrived = hold_figures(nodes[0], nodes[1])
        spec = InstanceSpec(MODEL, pins=(Pin(own, 0, 3), Pin(other, 3, 8)))
        placing = asyncio.create_task(nodes[0].instances.create(spec))
        await asyncio.wait([placing], timeout=0.5)
        assert not placing.done()
        arrived.set()
        assert [stage.peer for stage in (await placing).stages] == [own, other]


async def test_a_peer_that_was_here_a_moment_ago_may_come_back(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        await nodes[1].stop()
        await until(lambda: not nodes[0].membership.peers)
        with pytest.raises(PlacementError) as refused:
            await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        assert refused.value.code == "pending" and "n1" in str(refused.value)


async def test_a_peer_whose_memory_is_gone_since_it_was_last_heard_refuses_and_the_plan_is_solved_again(
    tmp_path: Path,
) -> None:
    machines = [Machine(2 * GB), Machine(2 * GB)]
    nodes = []
    for index, machine in enumerate(machines):
        bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",) if nodes else ()
        nodes.append(make_node(tmp_path / str(index), f"n{index}", machine, bootstrap_peers=bootstrap))
        await nodes[-1].start()
    try:
        await until(lambda: all(len(node.membership.telemetry) == 2 for node in nodes))
        own = nodes[0].membership.own.id
        held = {own: nodes[0].membership.telemetry[own]}
        machines[0].usable_bytes = 0
        await until(lambda: nodes[0]._hosting.host.usable_bytes() == 0)
        instance = await nodes[0].instances.create(InstanceSpec(MODEL))
        assert held and [stage.peer for stage in instance.stages] == [nodes[1].node_id]
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


async def test_reserved_memory_is_counted_once_and_comes_back(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, max_memory_bytes=GB) as (node,):
        usable = node.membership.telemetry[node.node_id].usable_bytes
        assert usable == GB
        instance = await node.instances.create(InstanceSpec(MODEL))
        reserved = instance.stages[0].reserve_bytes
        assert reserved > ENGINE_OVERHEAD_BYTES
        assert node.membership.telemetry[node.node_id].usable_bytes == GB - reserved
        assert await node.instances.delete(instance.id)
        assert node.membership.telemetry[node.node_id].usable_bytes == GB


async def test_an_instance_can_be_deleted_through_any_node(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: instances(nodes[1]))
        assert await nodes[1].instances.delete(instance.id)
        await until(lambda: not instances(nodes[0]) and not instances(nodes[1]))
        assert not await nodes[1].instances.delete(instance.id)
        assert len(await tokens(nodes[1], a_request())) == 12, "and placed again by the next request"


async def test_an_instance_can_be_deleted_while_it_loads(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, engine_options={"load_ms": "30000"}) as (node,):
        placing = asyncio.create_task(node.instances.create(InstanceSpec(MODEL)))
        await until(lambda: instances(node))
        assert await node.instances.delete("exo-mesh-demo-1")
        with pytest.raises(Exception, match="deleted while it was being placed"):
            await placing
        assert not instances(node)


@pytest.mark.extended
@pytest.mark.parametrize("finder", [0, 1])
async def test_callers_that_wait_for_an_instance_whose_weights_are_replaced_get_the_next_one(
    tmp_path: Path, finder: int
) -> None:
    async with mesh(tmp_path, 2, engine_options={"load_ms": "1500"}) as nodes:
        spec = InstanceSpec(MODEL, min_peers=2)
        placing = asyncio.create_task(nodes[0].instances.create(spec))
        await until(lambda: all(map(instances, nodes)))
        joining = asyncio.create_task(nodes[1].instances.create(spec))
        (before,) = {one.ballot for _, one in nodes[0].membership.view.records_of_instances()}
        await nodes[finder]._owning.instances.place_again(MODEL, only_ready=False)
        placed, joined = await asyncio.gather(placing, joining)
        assert len(placed.stages) == 2 and placed.id == joined.id
        (after,) = {one.ballot for _, one in nodes[0].membership.view.records_of_instances()}
        assert after > before
        assert len(await tokens(nodes[1], a_request())) == 12


@pytest.mark.extended
@pytest.mark.parametrize("asked", [0, 1])
async def test_of_two_that_were_placed_at_once_none_is_left_by_a_delete(tmp_path: Path, asked: int) -> None:
    async with mesh(tmp_path, 2, engine_options={"load_ms": "800"}) as nodes:
        placing = [asyncio.create_task(node.instances.create(InstanceSpec(MODEL))) for node in nodes]
        seen = nodes[asked].membership.view
        await until(lambda: len({owner for owner, _ in seen.records_of_instances()}) == 2)
        assert await nodes[asked].instances.delete("exo-mesh-demo-1")
        await asyncio.gather(*placing, return_exceptions=True)
        await until(lambda: not any(node.membership.view.records_of_instances() for node in nodes) and not runners())


async def test_an_unknown_model_is_refused_with_near_names(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        with pytest.raises(UnknownModelError, match="exo-mesh-demo"):
            await nodes[0].instances.create(InstanceSpec("exo-mesh-dem"))


async def test_what_a_node_says_of_models(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        (entry,) = nodes[0].models.all()
        assert entry.name == MODEL and set(entry.peers) == {node.node_id for node in nodes}
        assert entry == await nodes[0].models.named(MODEL)
        assert (await nodes[0].models.text_files(MODEL) / "tokenizer.json").is_file()
        assert await nodes[0].instances.context_limit(MODEL) == 2048


@pytest.mark.extended
async def test_a_node_stops_within_seconds_even_while_loading(tmp_path: Path) -> None:
    node = make_node(tmp_path, "n", Machine(), engine_options={"load_ms": "60000"})
    await node.start()
    placing = asyncio.create_task(node.instances.create(InstanceSpec(MODEL)))
    await until(lambda: instances(node))
    begin = time.monotonic()
    await node.stop()
    assert time.monotonic() - begin < 5
    assert (await asyncio.gather(placing, return_exceptions=True))[0] is not None


async def test_the_log_says_who_got_which_layers_and_how_each_request_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with mesh(tmp_path, 2) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await tokens(nodes[0], a_request())
        await until(lambda: caplog.text.count("is ready: loaded in") == 2)
    said = "\n".join(caplog.messages)
    assert f"placing {MODEL}-1: {MODEL} over 2 peers (layers n" in said and "0-4" in said and "4-8" in said
    assert f"loading stage {MODEL}-1[0:4] of {MODEL} with dummy, " in said
    assert f"stage {MODEL}-1[4:8] is ready: loaded in " in said and f"placed {MODEL}-1: " in said
    assert f"request r to {MODEL}: length after 3 tokens of prompt and 12 of output in " in said and " tokens/s" in said
