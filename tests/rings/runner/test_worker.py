"""What becomes of a stage when the code around its engine goes wrong, or the engine never comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.domain.frame import Frame, Insert, Row
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup
from exo_mesh.errors import RankLostError, StageLostError
from exo_mesh.rings.runner.driver import CALM_LAP_S, IDLE_LAP_S
from exo_mesh.rings.runner.endpoint import Endpoint
from exo_mesh.rings.runner.ring_rest import IDLE_AFTER_S
from exo_mesh.rings.runner.scheduling.kv_budget import KvBudget
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.rings.runner.stage_setup import StageSetup
from exo_mesh.rings.runner.worker import Worker
from tests.rings.runner.test_stage_and_driver import TinyEngine

BALLOT = Ballot(1, "test")


class BrokenEngine(TinyEngine):
    """Breaks the contract: an op raises."""

    def insert(self, sequence: int, max_tokens: int) -> None:
        raise RuntimeError("no more room")


def worker_of(engine: TinyEngine, **options: Any) -> Worker:
    """The first stage of two, as after a load."""
    stages = tuple(StagePlan(f"p{i}", "tiny", Shard("m", i, i + 1, 2), 0) for i in range(2))
    plan = Plan("i", BALLOT, "m", "digest", stages, 512, PlanInputs((), "memory", 1))
    worker = Worker(StageSetup(plan, 0, Path(), {}, 8), **options)
    worker.engine, worker._stage = engine, Stage(engine, 0)
    worker._budget = KvBudget(engine, 0, plan.kv_tokens)
    return worker


def test_a_plan_may_bound_the_sequences_that_run_at_once() -> None:
    worker = worker_of(TinyEngine(True, False))
    setup = worker._setup
    assert worker._limits().max_running == 32
    for most, expected in ((8, 8), (100, 32)):
        worker._setup = replace(setup, plan=replace(setup.plan, pool_sequences=most))
        assert worker._limits().max_running == expected


async def test_an_error_in_a_frame_that_was_read_directly_ends_the_runner() -> None:
    """Raised into the stream it came by, it would be lost with the frame, and the ring would wait for ever."""
    worker = worker_of(BrokenEngine(True, False))

    async def send(frame: Frame) -> None: ...

    running = asyncio.create_task(worker.run(send))
    await asyncio.sleep(0)
    await worker.accept(Frame(BALLOT, 1, (Row(1, 0, 1),), (5,), ops=(Insert(1, 8),)))
    with pytest.raises(RuntimeError, match="no more room"):
        await asyncio.wait_for(running, 5)


async def test_the_heartbeat_of_a_rank_that_does_not_come_back_from_a_frame_ends_it() -> None:
    """It waits for another rank, in native code, for ever; a stage of its own is its node's to judge."""
    worker = worker_of(TinyEngine(True, False))
    alone = worker._setup
    worker._computing_since, worker.deadline_s = 1e-9, 0.0  # it began long ago
    Endpoint(alone, worker).heartbeat()
    worker._setup = replace(alone, rank=RankWiring("ring", 1, ("127.0.0.1:1", "127.0.0.1:2")))
    with pytest.raises(RankLostError, match="rank 1 has been computing one frame"):
        Endpoint(worker._setup, worker).heartbeat()


def test_an_idle_ring_with_a_tensor_group_sends_frames_as_often_as_one_in_use() -> None:
    """Its ranks have no other way to say that they are short of memory."""
    worker = worker_of(TinyEngine(True, False))
    assert worker.idle_lap_s == IDLE_LAP_S
    worker.rest._used_at -= IDLE_AFTER_S
    assert worker.idle_lap_s == CALM_LAP_S
    plan = worker._setup.plan
    group = TensorGroup("ring", ("p1", "p2"))
    grouped = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], group=group)))
    worker = Worker(replace(worker._setup, plan=grouped))
    worker.rest._used_at -= IDLE_AFTER_S
    assert worker.idle_lap_s == IDLE_LAP_S


def test_only_a_stage_that_keeps_something_asks_an_idle_ring_for_a_frame() -> None:
    asked: list[str] = []
    worker = worker_of(TinyEngine(True, False), on_shortage=lambda: asked.append("lap"))
    worker.rest._used_at -= IDLE_AFTER_S
    worker.press(1, 0)
    assert not asked
    assert worker._budget is not None
    worker._budget._kept.add(1)
    worker.press(1, 0)
    worker.press(1, 0)
    assert asked == ["lap"], "one is on its way"


async def test_a_hop_that_is_lost_while_another_plan_comes_is_no_error() -> None:
    worker = worker_of(TinyEngine(True, False))
    losses, new_hop = list[str](), asyncio.Event()
    endpoint = Endpoint(worker._setup, worker, on_hop_lost=losses.append)

    class Hop:
        async def run(self) -> None:
            endpoint._link = NextHop()  # type: ignore[assignment]
            endpoint._changed.set()
            raise StageLostError("the next stage cannot be reached")

    class NextHop:
        async def run(self) -> None:
            new_hop.set()
            await asyncio.Event().wait()

    endpoint._link = Hop()  # type: ignore[assignment]
    keeping = asyncio.create_task(endpoint._keep_hop())
    async with asyncio.timeout(5):
        await new_hop.wait()
    keeping.cancel()
    await asyncio.wait([keeping])
    assert not losses


async def test_a_hop_that_ends_by_a_bug_ends_the_runner() -> None:
    worker = worker_of(TinyEngine(True, False))
    endpoint = Endpoint(worker._setup, worker)

    class Hop:
        async def run(self) -> None:
            endpoint._changed.set()
            raise RuntimeError("a bug")

    endpoint._link = Hop()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(5):
            await endpoint._keep_hop()
