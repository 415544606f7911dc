"""A stream that breaks is no lost ring: the entry peer asks the members, and dials again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.base.clock import monotonic
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.errors import CancelledRequestError, DeadlineError, StageLostError, TransportError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving import redial
from exo_mesh.rings.serving.redial import Redial, RingVerdict, look_at
from exo_mesh.wire.control_client import ControlClient
from tests.support.cutting import cut_connections_to
from tests.support.nodes import GB, MODEL, SLOW, a_request, collect, instances, mesh, runners, tokens, until
from tests.support.relays import has_second_loopback
from tests.support.two_ways import two_ways

TWO_OF_THREE = (2 * GB, 2 * GB, GB // 10)
"""The third node is the entry peer, and no stage fits there."""


def driver_port(instance: InstanceReport) -> int:
    return int(instance.stages[-1].endpoint.rpartition(":")[2])


async def placed(nodes: list[Node]) -> InstanceReport:
    await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
    await until(lambda: [one.state for one in instances(nodes[2])] == ["ready"])
    return instances(nodes[2])[0]


async def test_a_cut_stream_is_opened_again_on_the_same_ring_with_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW, usable_bytes=TWO_OF_THREE) as nodes:
        before = await placed(nodes)
        expected = await tokens(nodes[2], a_request("undisturbed", 30))
        asked: list[str] = []
        open_call = nodes[2]._serving.drivers.open

        def recording(endpoint: str, plan: Plan, request: GenerateRequest, *rest: Any, **options: Any) -> Any:
            asked.append(request.request_id)
            return open_call(endpoint, plan, request, *rest, **options)

        monkeypatch.setattr(nodes[2]._serving.drivers, "open", recording)
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[2], "disturbed", 30, got))
        for enough in (5, 15):
            await until(lambda enough=enough: len(got) > enough)
            assert cut_connections_to(driver_port(before)) == 1
        async with asyncio.timeout(15):
            await request
        assert got == expected
        assert instances(nodes[2]) == [before], "the same instance, ballot, owner and processes"
        assert set(runners()) == {stage.pid for stage in before.stages}
        assert len(set(asked)) == len(asked) == 3, "a driver that has not noticed the break yet refuses an id twice"
        metrics = nodes[2].metrics.registry
        assert metrics.get_sample_value("exo_mesh_driver_redials_total", {"model": MODEL}) == 2
        assert metrics.get_sample_value("exo_mesh_requests_resumed_total", {"model": MODEL}) == 0


@pytest.mark.slow
async def test_all_requests_on_a_cut_connection_go_on(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW, usable_bytes=TWO_OF_THREE) as nodes:
        before = await placed(nodes)
        expected = await tokens(nodes[2], a_request("undisturbed", 40))
        got: list[list[int]] = [[], [], []]
        requests = [asyncio.create_task(collect(nodes[2], f"r{n}", 40, into)) for n, into in enumerate(got)]
        await until(lambda: all(len(one) > 5 for one in got))
        assert cut_connections_to(driver_port(before)) >= 1
        async with asyncio.timeout(15):
            await asyncio.gather(*requests)
        assert got == [expected] * 3 and instances(nodes[2]) == [before]


@pytest.mark.skipif(not has_second_loopback(), reason="this system has one loopback address")
@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize(
    "num_tokens",
    [
        pytest.param(60, id="the answer ends meanwhile", marks=pytest.mark.extended),
        pytest.param(800, id="the answer goes on", marks=pytest.mark.slow),
    ],
)
async def test_a_stream_that_falls_silent_is_opened_again(tmp_path: Path, num_tokens: int) -> None:
    """Nobody says that the connection is dead; unanswered pings do, at each end in its own time."""
    async with two_ways(tmp_path) as mesh:
        before = await mesh.far.instances.create(InstanceSpec(MODEL, exclude_peers=(mesh.near.node_id,)))
        await until(lambda: [one.state for one in instances(mesh.near)] == ["ready"])
        expected = await tokens(mesh.near, a_request("undisturbed", num_tokens))
        got: list[int] = []
        request = asyncio.create_task(collect(mesh.near, "disturbed", num_tokens, got))
        await until(lambda: len(got) > 10)
        mesh.data.freeze()
        async with asyncio.timeout(30):
            await request
        assert got == expected and instances(mesh.near) == [before]
        beat = mesh.far._hosting.host.beat
        await until(lambda: (last := beat(before.id)) is not None and last.sequences == last.running == 0)


async def test_members_say_of_a_ring_whether_it_runs(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, usable_bytes=TWO_OF_THREE) as nodes:
        before = await placed(nodes)
        (instance,) = nodes[2]._owning.instances.of_model(MODEL)
        members = nodes[2]._serving.router._rings.members
        assert await look_at(instance.plan, members) == (RingVerdict.WELL, "")
        first = next(node for node in nodes if node.node_id == before.stages[0].peer)
        host = first._hosting.host
        assert "does not run here" in await host.look(before.id, Ballot(9, "x")), "another plan of the same instance"
        os.kill(before.stages[0].pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while not await host.look(before.id, instance.plan.ballot):
                await asyncio.sleep(0.01)
        verdict, reason = await look_at(instance.plan, members)
        assert verdict is RingVerdict.LOST and first.node_id[:8] in reason


@pytest.mark.extended
async def test_a_ring_that_is_well_is_not_placed_anew_because_one_peer_cannot_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redial, "REDIAL_S", 0.5)
    async with mesh(tmp_path, 1) as (node,):
        before = await node.instances.create(InstanceSpec(MODEL))
        monkeypatch.setattr(Redial, "address", lambda redial, endpoint: "127.0.0.1:1")
        with pytest.raises(
            TransportError, match=r"is healthy, but .* has never answered this node: check the firewalls"
        ):
            await tokens(node, a_request())
        monkeypatch.undo()
        assert len(await tokens(node, a_request())) == 12 and instances(node) == [before]


@pytest.mark.slow
async def test_a_driver_that_stands_still_is_not_waited_for(tmp_path: Path) -> None:
    """Its connections break by unanswered pings, long before its node gives it up."""
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        before = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        expected = await tokens(nodes[0], a_request("undisturbed", 60))
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[0], "disturbed", 60, got))
        await until(lambda: len(got) > 5)
        os.kill(before.stages[-1].pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            await request
        assert got == expected and instances(nodes[0])[0].ballot > before.ballot


@pytest.mark.extended
async def test_a_ring_of_which_nobody_knows_counts_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redial, "REDIAL_S", 0.3)
    async with mesh(tmp_path, 3, usable_bytes=TWO_OF_THREE) as nodes:
        await placed(nodes)
        (instance,) = nodes[2]._owning.instances.of_model(MODEL)

        async def no_answer(
            client: ControlClient, row: object, request: object, timeout_s: float | None = None
        ) -> None:
            raise DeadlineError("no answer")

        monkeypatch.setattr(ControlClient, "call", no_answer)
        with pytest.raises(StageLostError, match="no peer knows the state of"):
            await Redial(instance.plan, nodes[2]._serving.router._rings.members, monotonic).wait(0)


async def test_a_request_that_waits_for_its_ring_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redial, "REDIAL_S", 60.0)
    monkeypatch.setattr(redial, "MAX_REDIALS", 10**6)
    async with mesh(tmp_path, 1) as (node,):
        await node.instances.create(InstanceSpec(MODEL))
        monkeypatch.setattr(Redial, "address", lambda redial, endpoint: "127.0.0.1:1")
        request = asyncio.create_task(tokens(node, a_request("r")))
        await until(lambda: node.metrics.registry.get_sample_value("exo_mesh_driver_redials_total", {"model": MODEL}))
        assert await node.requests.cancel("r")
        with pytest.raises(CancelledRequestError):
            await request
