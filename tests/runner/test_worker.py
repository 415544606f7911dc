"""What becomes of a stage when the code around its engine goes wrong, or the engine never comes back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from exo_mesh.domain.frame import Frame, Insert, Row
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.errors import EngineError
from exo_mesh.runner.kv_budget import KvBudget
from exo_mesh.runner.stage import Stage
from exo_mesh.runner.worker import StageSetup, Worker
from tests.runner.test_stage_and_driver import TinyEngine

BALLOT = Ballot(1, "test")


class BrokenEngine(TinyEngine):
    """Breaks the contract: an op raises."""

    def insert(self, sequence: int, max_tokens: int) -> None:
        raise RuntimeError("no more room")


def worker_of(engine: TinyEngine) -> Worker:
    """The first stage of two, as after a load."""
    stages = tuple(StagePlan(f"p{i}", "tiny", Shard("m", i, i + 1, 2), 0) for i in range(2))
    plan = Plan("i", BALLOT, "m", "digest", stages, 512, PlanInputs((), "memory", 1))
    worker = Worker(StageSetup(plan, 0, Path(), {}, 8))
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
    await worker.accept(Frame(BALLOT, 1, 0, (Row(1, 0, 1),), (5,), ops=(Insert(1, 8),)))
    with pytest.raises(RuntimeError, match="no more room"):
        await asyncio.wait_for(running, 5)


def test_an_engine_that_does_not_come_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.runner.worker.STUCK_S", 0.05)
    worker = worker_of(TinyEngine(True, False))
    worker.check_alive()
    worker._computing_since = time.perf_counter()
    worker.check_alive()
    time.sleep(0.1)
    with pytest.raises(EngineError, match="not come back"):
        worker.check_alive()
