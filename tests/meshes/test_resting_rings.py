"""A ring that nobody uses closes its hops, and the next request finds it as it was. The runners here take a ring for
idle after a fraction of a second."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, collect, instances, mesh, tokens, until

QUICK_TO_REST = """
import sys
from exo_mesh.rings.runner import ring_rest
from exo_mesh.wire import ring_link
ring_rest.IDLE_AFTER_S, ring_link.REST_LOOK_S = 0.3, 0.05
from exo_mesh.rings.runner.__main__ import main
sys.exit(main())
"""
COMMAND = (sys.executable, "-c", QUICK_TO_REST)


async def a_ring(nodes: list[Node]) -> None:
    await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=len(nodes)))
    await until(lambda: all([one.state for one in instances(node)] == ["ready"] for node in nodes))


def rest(nodes: list[Node]) -> list[bool]:
    """Whether the hop of each stage rests, by the last heartbeat."""
    return [stage.beat.hop_rests for node in nodes for stage in node._hosting.host.beats()]


def linked(nodes: list[Node]) -> list[bool]:
    return [stage.beat.linked for node in nodes for stage in node._hosting.host.beats()]


async def test_an_idle_ring_rests_is_healthy_and_answers_as_before(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, commands=(COMMAND,) * 3) as nodes:
        await a_ring(nodes)
        before, expected = instances(nodes[0]), None
        for turn in range(4):
            await until(lambda: rest(nodes) == [True] * 3)
            assert linked(nodes) == [True] * 3
            assert instances(nodes[0]) == before, "nothing was placed again"
            got = await tokens(nodes[turn % 3], a_request(f"r{turn}", 20))
            expected = expected or got
            assert got == expected


@pytest.mark.extended
async def test_requests_that_race_with_the_closing_of_hops_are_right(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, commands=(COMMAND,) * 2) as nodes:
        await a_ring(nodes)
        before = instances(nodes[0])
        expected = await tokens(nodes[0], a_request("first", 8))
        for turn in range(25):
            await asyncio.sleep(0.25 + 0.01 * turn)  # around the time at which the ring counts as idle
            assert await tokens(nodes[turn % 2], a_request(f"r{turn}", 8)) == expected
        assert instances(nodes[0]) == before


async def test_a_resting_ring_whose_runner_is_killed_is_replaced_without_a_request(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, commands=(COMMAND,) * 2) as nodes:
        await a_ring(nodes)
        expected = await tokens(nodes[0], a_request("before", 12))
        await until(lambda: rest(nodes) == [True, True])
        (runner,) = nodes[1]._hosting.host.runners.values()
        old = instances(nodes[0])
        os.kill(runner.pid, signal.SIGKILL)
        await until(lambda: instances(nodes[0]) not in ([], old), 20)
        assert await tokens(nodes[0], a_request("after", 12)) == expected


async def test_a_machine_that_becomes_short_of_memory_makes_a_resting_ring_send_a_lap(tmp_path: Path) -> None:
    """It is not the one of the driver, which alone sends frames. The ring keeps the prompt of the request."""
    async with mesh(tmp_path, 3, commands=(COMMAND,) * 3) as nodes:
        await a_ring(nodes)
        prompt = tuple(range(5, 250))
        await tokens(nodes[0], a_request("r", 8, prompt))
        (node,) = (one for one in nodes for stage in one._hosting.host.beats() if stage.index == 0)
        await until(lambda: rest(nodes) == [True] * 3)

        def frames_in() -> int:
            (here,) = node._hosting.host.beats()
            return here.beat.frames_in

        before = frames_in()
        await node._hosting.host.press(1, 0)
        await until(lambda: frames_in() > before)
        await until(lambda: rest(nodes) == [True] * 3)


@pytest.mark.extended
async def test_members_of_a_resting_ring_probe_by_datagrams_and_by_calls_during_a_request(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, commands=(COMMAND,) * 2, engine_options={"cost_ms": "20"}) as nodes:
        await a_ring(nodes)
        await until(lambda: rest(nodes) == [True, True])

        def must_call() -> list[bool]:
            return [node.membership.probing._must_call(peer) for node in nodes for peer in node.membership.peers]

        await until(lambda: must_call() == [False, False])
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[0], "r", 60, got))
        await until(lambda: got)
        assert must_call() == [True, True]
        await request
        await until(lambda: must_call() == [False, False])
