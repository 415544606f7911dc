"""Several instances of one model: who gets a request, and where it goes when its instance is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from exo_mesh.errors import PlacementError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving.choices import fan_out
from tests.support.nodes import MODEL, a_request, collect, instances, mesh, tokens, until

SLOW = {"cost_ms": "10"}


def live(node: Node) -> Counter[str]:
    return node._serving.journal.outstanding()


def outstanding(node: Node) -> Counter[str]:
    """As this node has been told."""
    said: Counter[str] = Counter()
    for reading in node.membership.telemetry.values():
        said.update(reading.outstanding)
    return said


@pytest.mark.extended
async def test_replicas_are_on_peers_of_their_own_and_share_the_load(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW) as nodes:
        made = await nodes[0].instances.create_replicas(InstanceSpec(MODEL), 3)
        assert [one.id for one in made] == [f"{MODEL}-{number}" for number in (1, 2, 3)]
        assert {stage.peer for one in made for stage in one.stages} == {node.node_id for node in nodes}
        again = await nodes[0].instances.create_replicas(InstanceSpec(MODEL), 3)
        assert {one.id for one in again} == {one.id for one in made}, "those there are count"
        try:
            await nodes[0].instances.create_replicas(InstanceSpec(MODEL), 4)
        except PlacementError as exc:
            assert exc.reason == "no_candidates"
        else:
            raise AssertionError("there is no fourth peer")
        expected = await tokens(nodes[0], a_request("undisturbed", 150))
        await asyncio.gather(*(tokens(nodes[0], a_request(f"first{number}", 20)) for number in range(3)))
        got: list[list[int]] = [[] for _ in range(9)]
        running = []
        for number in range(9):
            running.append(asyncio.create_task(collect(nodes[0], f"r{number}", 150, got[number])))
            await until(lambda number=number: sum(live(nodes[0]).values()) == number + 1)  # type: ignore[misc]
        assert len(live(nodes[0])) == 3 and max(live(nodes[0]).values()) <= 5, "they are about equally fast"
        await asyncio.gather(*running)
        assert all(one == expected for one in got)
        choices = [asyncio.create_task(tokens(nodes[0], one)) for one in fan_out(a_request("c", 60), 3)]
        await until(lambda: sum(live(nodes[0]).values()) == 3)
        assert len(live(nodes[0])) == 1, "choices of one request run where its prompt is computed"
        await asyncio.gather(*choices)


@pytest.mark.slow
async def test_what_other_entry_peers_send_counts_too(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        await nodes[0].instances.create_replicas(InstanceSpec(MODEL), 2)
        await until(lambda: len(instances(nodes[1])) == 2)
        got: list[list[int]] = [[] for _ in range(4)]
        first = [asyncio.create_task(collect(nodes[0], f"a{n}", 1000, got[n])) for n in range(2)]
        await until(lambda: all(got[:2]))
        await until(lambda: outstanding(nodes[1]) == live(nodes[0]))
        second = [asyncio.create_task(collect(nodes[1], f"b{n}", 1000, got[2 + n])) for n in range(2)]
        await until(lambda: all(got))
        assert live(nodes[0]) + live(nodes[1]) == Counter({f"{MODEL}-1": 2, f"{MODEL}-2": 2})
        for task in (*first, *second):
            task.cancel()
        await asyncio.gather(*first, *second, return_exceptions=True)


@pytest.mark.extended
async def test_requests_of_a_lost_replica_go_on_at_another_with_the_same_text(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        made = await nodes[0].instances.create_replicas(InstanceSpec(MODEL), 2)
        expected = await tokens(nodes[0], a_request("undisturbed", 80))
        got: list[list[int]] = [[] for _ in range(6)]
        running = [asyncio.create_task(collect(nodes[0], f"r{n}", 80, got[n])) for n in range(6)]
        await until(lambda: all(len(one) > 5 for one in got))
        assert set(live(nodes[0])) == {one.id for one in made}
        os.kill(made[1].stages[0].pid, signal.SIGKILL)
        await asyncio.gather(*running)
        assert all(one == expected for one in got)
        spawned = [len(node._hosting.runner_history.flights.logs) for node in nodes]
        assert sum(spawned) <= 3, "the lost stage is started again in its place, and nothing else is placed"


@pytest.mark.extended
async def test_waiting_requests_move_to_a_replica_that_is_new(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW, max_batch_size=1) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL))
        expected = await tokens(nodes[0], a_request("undisturbed", 30))
        got: list[list[int]] = [[] for _ in range(3)]
        running = [asyncio.create_task(collect(nodes[0], f"r{n}", 1500, got[n])) for n in range(3)]
        await until(lambda: outstanding(nodes[0]) == Counter({f"{MODEL}-1": 3}))
        await nodes[0].instances.create_replicas(InstanceSpec(MODEL), 2)
        await until(lambda: live(nodes[0]) == Counter({f"{MODEL}-1": 2, f"{MODEL}-2": 1}))
        await until(lambda: sum(len(one) >= 30 for one in got) == 2)
        assert all(one[:30] == expected for one in got if one)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.extended
async def test_a_request_that_a_full_queue_refuses_is_served_by_another_replica(tmp_path: Path) -> None:
    settings = {"max_batch_size": 1, "max_queued": 1}
    async with mesh(tmp_path, 2, engine_options=SLOW, each=[settings, {}]) as nodes:
        await nodes[0].instances.create_replicas(InstanceSpec(MODEL), 2)
        for node in nodes:  # what the others report would keep it from the full one
            node._owning.instances.choice.best = lambda ready, load: ready[0]  # type: ignore[method-assign]
        got: list[list[int]] = [[] for _ in range(5)]
        running = [asyncio.create_task(collect(nodes[0], f"r{n}", 60, got[n])) for n in range(5)]
        await asyncio.gather(*running)
        assert [len(one) for one in got] == [60] * 5
