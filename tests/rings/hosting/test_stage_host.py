"""What a member does with its stages when their owner is gone, and a node with its rings when it stops."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.download import FetchStep
from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.stage import StageFetching, StageReady
from exo_mesh.domain.view import InstanceInfo, InstanceState, RecordKey
from exo_mesh.errors import InputError, PlacementError, StageLostError
from exo_mesh.node.node import Node
from exo_mesh.rings.hosting.reservations import LEASE_S
from exo_mesh.rings.hosting.runner_exit import End
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, instances, mesh, runners, tokens, until


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def a_plan(node: Node, instance_id: str) -> Plan:
    """A plan for this node alone, of an owner whom nobody knows."""
    card = await node._models.catalogue.card(MODEL)
    return await node._owning.planner.propose(card, InstanceSpec(MODEL), instance_id, Ballot(1, "ghost"))


@pytest.mark.extended
async def test_a_stage_that_nobody_watches_any_more_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner died before the mesh heard of the instance, or its release got lost on the way."""
    monkeypatch.setattr("exo_mesh.rings.hosting.reservations.LEASE_S", 1.0)
    monkeypatch.setattr("exo_mesh.rings.hosting.stage_host.EXPIRE_EVERY_S", 0.2)
    async with mesh(tmp_path, 1) as (node,):
        plan = await a_plan(node, "unheard-of-1")
        assert (await node._hosting.host.reserve(plan, 0)).granted
        async with aclosing(node._hosting.host.commit(plan.instance_id, plan.ballot)) as reports:
            async for report in reports:
                if isinstance(report, StageReady):
                    break
            await asyncio.sleep(2)
            assert runners() and node._hosting.host.memory.reserved_bytes > 0, "as long as it is watched it stays"
        await until(lambda: not runners())
        assert node._hosting.host.memory.reserved_bytes == 0


@pytest.mark.extended
async def test_after_a_runner_ended_for_want_of_memory_the_next_plan_is_smaller(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        before = await a_plan(node, "large-1")
        reserved = before.stages[0].reserve_bytes
        node._hosting.runner_history.guard.ended(before, 0, End.OOM, "was killed by SIGKILL", frames=1000)
        answer = await node._hosting.host.reserve(before, 0)
        assert not answer.granted and ENGINE_OVERHEAD_BYTES < answer.usable_bytes < reserved
        instance = await node.instances.create(InstanceSpec(MODEL))
        assert instance.state == "ready"
        assert node._hosting.host.leases[0].stage.reserve_bytes <= answer.usable_bytes


@pytest.mark.extended
async def test_a_lease_holds_however_long_its_files_are_fetched(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        host, plan, now = node._hosting.host, await a_plan(node, "slow-1"), [node._clock()]
        host._clock = lambda: now[0]
        expired = []

        async def slow(plan: Plan, index: int) -> AsyncGenerator[FetchStep, None]:
            for done in range(10):
                yield FetchStep(done, 10)
                now[0] += 0.9 * LEASE_S
                expired.extend(host._reservations.expire(now[0]))

        host._models = replace(host._models, fetch=slow)
        assert (await host.reserve(plan, 0)).granted
        fetched = []
        async with aclosing(host.commit(plan.instance_id, plan.ballot)) as reports:
            async for report in reports:
                if isinstance(report, StageFetching):
                    fetched.append(report.done)
                if isinstance(report, StageReady):
                    break
        assert fetched == list(range(10)) and not expired and host.memory.reserved_bytes > 0
        await host.release(plan.instance_id, plan.ballot)


@pytest.mark.extended
async def test_a_fetch_for_a_plan_that_was_released_ends(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        host, plan = node._hosting.host, await a_plan(node, "released-1")
        ended = []

        async def endless(plan: Plan, index: int) -> AsyncGenerator[FetchStep, None]:
            try:
                while True:
                    yield FetchStep(0, 10)
            finally:
                ended.append(plan.instance_id)

        host._models = replace(host._models, fetch=endless)
        assert (await host.reserve(plan, 0)).granted
        with pytest.raises(StageLostError, match="given up while its files were fetched"):
            async with aclosing(host.commit(plan.instance_id, plan.ballot)) as reports:
                async for _ in reports:
                    await host.release(plan.instance_id, plan.ballot)
        assert ended == ["released-1"] and not runners() and host.memory.reserved_bytes == 0


async def test_a_release_leaves_a_stage_that_is_reserved_for_a_higher_ballot(tmp_path: Path) -> None:
    """The owner that is beaten releases its ring as soon as one stage continues under the higher ballot: another stage
    that had not been committed yet lost its process, and with it the KV that the new plan counted on."""
    async with mesh(tmp_path, 1) as (node,):
        host, old = node._hosting.host, await a_plan(node, "beaten-1")
        new, wrong = replace(old, ballot=Ballot(2, "winner")), replace(old, ballot=Ballot(3, "loser"))

        async def become_ready(plan: Plan, keep_kv_from: int | None = None) -> int:
            async with aclosing(host.commit(plan.instance_id, plan.ballot, keep_kv_from)) as reports:
                async for report in reports:
                    if isinstance(report, StageReady):
                        break
            (pid,) = runners()
            return pid

        assert (await host.reserve(old, 0)).granted
        pid = await become_ready(old)
        assert (await host.reserve(new, 0)).granted
        await host.release(old.instance_id, old.ballot)
        assert await become_ready(new, keep_kv_from=0) == pid
        assert (await host.reserve(wrong, 0)).granted
        await host.release(old.instance_id, wrong.ballot)
        assert not runners() and host.memory.reserved_bytes == 0, "nothing is reserved any more"


async def test_a_node_that_stops_takes_no_stage(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        plan = await a_plan(node, "late-1")
        assert (await node._hosting.host.reserve(plan, 0)).granted
        await node._hosting.host.stop()
        with pytest.raises(StageLostError, match="stopping"):
            await anext(node._hosting.host.commit(plan.instance_id, plan.ballot))
        assert not (await node._hosting.host.reserve(await a_plan(node, "later-1"), 0)).granted


@pytest.mark.extended
async def test_a_node_stops_in_time_when_a_member_of_its_ring_does_not_answer(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))

        async def silent(instance_id: str, ballot: Ballot) -> None:
            await asyncio.sleep(60)

        nodes[1]._hosting.host.release = silent  # type: ignore[method-assign]
        begin = time.monotonic()
        await nodes[0].stop()
        assert time.monotonic() - begin < 4


async def test_the_end_of_a_lost_ring_leaves_the_record_of_the_next_one(tmp_path: Path) -> None:
    """The members of the lost ring may take long to release it, and meanwhile the model is being placed again."""
    async with mesh(tmp_path, 1) as (node,):
        await node.instances.create(InstanceSpec(MODEL))
        key = RecordKey("instance", f"{MODEL}-1", node.node_id)
        release = node._hosting.host.release

        async def slow(instance_id: str, ballot: Ballot) -> None:
            await asyncio.sleep(0.3)
            await release(instance_id, ballot)

        node._hosting.host.release = slow  # type: ignore[method-assign]

        async def hopeless(*arguments: object, **options: object) -> None:
            raise PlacementError("as the test wants")

        recover, node._owning.owned_rings._recoverer.recover = node._owning.owned_rings._recoverer.recover, hopeless  # type: ignore
        keeper = node._owning.owned_rings.monitors[key.id]
        keeper._lose(StageLostError("as the test wants"))
        await until(lambda: state_of(node, key) is InstanceState.FAILED)
        node._owning.owned_rings._recoverer.recover = recover  # type: ignore[method-assign]
        assert (await node.instances.create(InstanceSpec(MODEL))).ballot[0] == 2
        await until(lambda: not any(task.get_name().startswith("end ") for task in asyncio.all_tasks()))
        assert state_of(node, key) is InstanceState.READY and len(runners()) == 1


def state_of(node: Node, key: RecordKey) -> InstanceState | None:
    record = node.membership.view.get(key)
    return record.value.state if record and isinstance(record.value, InstanceInfo) else None


async def test_more_context_than_the_model_has_is_refused(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        with pytest.raises(InputError, match="context_limit"):
            await node.instances.create(InstanceSpec(MODEL, context_limit=10**9))
        assert not instances(node)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_a_ring_works_on_ipv6(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, host="::1") as (node,):
        assert len(await tokens(node, a_request())) == 12
