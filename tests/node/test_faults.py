"""What a caller sees when runners, nodes and requests end before their time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from exo_mesh.domain.request import TokenEvent
from exo_mesh.errors import CancelledRequestError, ContextLengthError, InputError, StageLostError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, SLOW, a_request, collect, crash, instances, mesh, runners, tokens, until


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_without_resuming_a_killed_runner_ends_the_request_with_one_typed_error(
    tmp_path: Path, stage: int
) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW, max_resumes=0) as nodes:
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[0], "r", 1000, got))
        await until(lambda: len(got) > 3)
        os.kill(instance.stages[stage].pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            with pytest.raises(StageLostError):
                await request
        assert len(await tokens(nodes[0], a_request("next"))) == 12
        assert len(nodes[0]._serving.journal) == 0


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.extended)]
)
async def test_a_request_survives_the_death_of_any_runner_with_the_same_text(tmp_path: Path, stage: int) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        expected = await tokens(nodes[1], a_request("undisturbed", 30))
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[1], "disturbed", 30, got))
        await until(lambda: len(got) > 10)
        os.kill(instance.stages[stage].pid, signal.SIGKILL)
        await asyncio.wait_for(request, 15)
        assert got == expected
        assert len(nodes[1]._serving.journal) == 0


@pytest.mark.extended
async def test_a_request_survives_the_death_of_a_peer_in_its_ring(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW) as nodes:
        await nodes[2].instances.create(InstanceSpec(MODEL, min_peers=3))
        await until(lambda: instances(nodes[0]))
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[0], "r", 80, got))
        await until(lambda: len(got) > 10)
        await nodes[2].stop()
        await asyncio.wait_for(request, 20)
        assert len(got) == 80
        await until(lambda: not any(nodes[2].node_id in str(one.stages) for one in instances(nodes[0])))


async def test_an_open_ring_outlives_the_node_that_placed_it(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW, usable_bytes=(2 * 10**9, 2 * 10**9, 10**8)) as nodes:
        instance = await nodes[2].instances.create(InstanceSpec(MODEL, min_peers=2))
        members = {stage.peer for stage in instance.stages}
        assert members == {nodes[0].node_id, nodes[1].node_id} and instance.owner == nodes[2].node_id
        await until(lambda: instances(nodes[0]))
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[0], "r", 40, got))
        await until(lambda: len(got) > 5)
        await crash(nodes[2])
        await asyncio.wait_for(request, 10)
        await until(lambda: len(instances(nodes[0])) == 1 and instances(nodes[0])[0].owner in members)
        assert len(got) == 40 and instances(nodes[0])[0].digest == instance.digest


async def test_a_cancelled_request_ends_and_frees_its_sequence(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[0], "mine", 1000, got))
        await until(lambda: len(got) > 3)
        assert await nodes[1].requests.cancel("mine"), "through any peer"
        with pytest.raises(CancelledRequestError):
            await request
        assert not await nodes[1].requests.cancel("mine")
        await until(lambda: all(free(node) for node in nodes))


def free(node: Node) -> bool:
    state = node.observation.state()
    beats = state.stages_here.values()
    is_idle = state.runner.runner_status == "idle" and not state.requests_here
    return is_idle and bool(beats) and all(beat.sequences == 0 for beat in beats)


async def test_closing_the_stream_cancels_the_request(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, engine_options=SLOW) as (node,):
        async with aclosing(node.requests.generate(MODEL, a_request("r", 1000))) as items:
            async for item in items:
                if isinstance(item, TokenEvent):
                    break
        assert len(node._serving.journal) == 0
        await until(lambda: free(node))


async def test_bad_requests_are_refused_by_name(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, engine_options=SLOW) as (node,):
        with pytest.raises(ContextLengthError, match="2048"):
            await tokens(node, a_request("long", 3000))
        got: list[int] = []
        running = asyncio.create_task(collect(node, "twice", 50, got))
        await until(lambda: got)
        with pytest.raises(InputError, match="twice"):
            await tokens(node, a_request("twice"))
        await running


async def test_an_engine_that_cannot_load_is_a_typed_error_and_leaves_nothing(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, engine_options={"no_such_option": "1"}) as (node,):
        with pytest.raises(InputError, match="no_such_option"):
            await tokens(node, a_request())
        assert not instances(node) and not runners()
        assert node.membership.telemetry[node.node_id].reserved_bytes == 0


async def test_a_frozen_runner_is_killed_after_its_silence(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, silence_s=1.0) as (node,):
        instance = await node.instances.create(InstanceSpec(MODEL))
        pid = instance.stages[0].pid
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: pid not in runners(), 30)
        await until(lambda: [one.stages[0].pid != pid for one in instances(node) if one.state == "ready"] == [True])
        assert len(await tokens(node, a_request())) == 12


A_NODE = """
import asyncio, sys
from pathlib import Path
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, Machine, make_node

async def main():
    node = make_node(Path(sys.argv[1]), "doomed", Machine())
    await node.start()
    instance = await node.instances.create(InstanceSpec(MODEL))
    print(instance.stages[0].pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.extended
async def test_no_runner_outlives_its_killed_node(tmp_path: Path) -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", A_NODE, str(tmp_path), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert node.stdout is not None
    pid = int(await asyncio.wait_for(node.stdout.readline(), 30))
    assert psutil.pid_exists(pid)
    node.kill()
    await node.wait()
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 2)
