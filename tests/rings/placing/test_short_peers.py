"""One peer runs short of memory while others have room: requests go to these, and the ring on it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from exo_mesh.errors import MemoryPressureError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import GB, MODEL, Machine, a_request, instances, knows_all, make_node, tokens, until

FULL = -int(0.9 * 2**30)
"""What makes 0.1 GiB of the machine free."""


@pytest.fixture
async def pressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[list[Node], list[Machine]]]:
    """Two nodes, and their machines; the model runs at the first."""
    monkeypatch.setattr("exo_mesh.rings.placing.unloading.SHORT_IDLE_S", 0.2)
    machines = [Machine(8 * GB), Machine(8 * GB)]
    nodes: list[Node] = []
    try:
        for index, machine in enumerate(machines):
            bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",) if nodes else ()
            options = {"engine_options": {"cost_ms": "10"}, "memory_poll_interval": 0.05}
            nodes.append(make_node(tmp_path / str(index), f"n{index}", machine, bootstrap_peers=bootstrap, **options))
            await nodes[-1].start()
        await until(lambda: all(knows_all(node, 2) for node in nodes))
        yield nodes, machines
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


async def one_running_and_one_waiting(node: Node, *short: Machine) -> list[asyncio.Task[list[int]]]:
    """On a ring whose machine becomes short of memory while both run: so it refuses the next one."""
    asked = [asyncio.create_task(tokens(node, a_request(f"long{n}", max_tokens=250))) for n in range(2)]
    await until(lambda: sum(stage.beat.running for stage in node._hosting.host.beats()) == 2)
    for machine in short:
        machine.usable_bytes = FULL
    await until(lambda: sum(stage.beat.running for stage in node._hosting.host.beats()) == 1)
    await until(lambda: sum(stage.beat.queued for stage in node._hosting.host.beats()) == 1)
    return asked


@pytest.mark.extended
async def test_a_ring_on_a_peer_that_is_short_of_memory_is_placed_again_where_there_is_room(
    pressed: tuple[list[Node], list[Machine]],
) -> None:
    nodes, machines = pressed
    await nodes[0].instances.create(InstanceSpec(MODEL))
    asked = await one_running_and_one_waiting(nodes[0], machines[0])
    answers = await asyncio.gather(*(tokens(node, a_request(f"new{n}")) for n, node in enumerate(nodes)))
    assert len(answers[0]) == 12 and answers[0] == answers[1], "at either entry peer"
    rings = {one.id: [stage.peer for stage in one.stages] for one in instances(nodes[1])}
    assert rings == {f"{MODEL}-1": [nodes[0].node_id], f"{MODEL}-2": [nodes[1].node_id]}
    assert [len(text) for text in await asyncio.gather(*asked)] == [250, 250], "what was accepted is served"
    await until(lambda: [one.id for one in instances(nodes[1])] == [f"{MODEL}-2"])


@pytest.mark.extended
async def test_where_nobody_has_room_the_refusal_names_peer_numbers_and_remedy(
    pressed: tuple[list[Node], list[Machine]],
) -> None:
    nodes, machines = pressed
    await nodes[0].instances.create(InstanceSpec(MODEL))
    asked = await one_running_and_one_waiting(nodes[0], *machines)
    with pytest.raises(MemoryPressureError) as refused:
        await tokens(nodes[1], a_request("new"))
    text = str(refused.value)
    assert "peer n0: 107 MB of 21.47 GB memory are free on this machine" in text and "end other programs" in text
    assert refused.value.code == "memory_pressure" and refused.value.retry_after_s >= 10
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
