"""Idle runners that have imported their engine: taken by the next stage, replaced, and gone with their node."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from exo_mesh.rings.hosting import spares
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, instances, mesh, runners, tokens, until


def idle(pool: spares.SparePool) -> list[int]:
    return [child.process.pid for _, child in pool._idle]


async def test_a_lost_runner_is_replaced_by_the_spare_which_is_replaced_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "REFILL_AFTER_S", 0.0)
    async with mesh(tmp_path, 1, spare_runners=1) as (node,):
        pool = node._hosting.host._starter.spares
        await until(lambda: idle(pool))
        (first,) = idle(pool)
        placed = await node.instances.create(InstanceSpec(MODEL))
        assert placed.stages[0].pid == first
        await until(lambda: idle(pool))
        (second,) = idle(pool)
        os.kill(first, signal.SIGKILL)
        await until(lambda: [one.stages[0].pid for one in instances(node) if one.state == "ready"] == [second])
        assert len(await tokens(node, a_request())) == 12
        await until(lambda: len(runners()) == 2)


async def test_a_spare_that_dies_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "BROKEN_AFTER_S", 0.0)
    async with mesh(tmp_path, 1, spare_runners=1) as (node,):
        pool = node._hosting.host._starter.spares
        await until(lambda: idle(pool))
        (first,) = idle(pool)
        os.kill(first, signal.SIGKILL)
        await until(lambda: idle(pool) not in ([], [first]))
        assert first not in runners() and len(await tokens(node, a_request())) == 12


async def test_each_engine_of_the_plans_gets_a_spare_and_loses_it_with_its_last_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spares, "LOOK_EVERY_S", 0.01)
    wanted = ["dummy"]
    pool = spares.SparePool(1, lambda: wanted)
    keeping = asyncio.create_task(pool.keep())
    try:
        await until(lambda: [engine for engine, _ in pool._idle] == ["dummy"])
        wanted.append("numpy")
        await until(lambda: [engine for engine, _ in pool._idle] == ["dummy", "numpy"])
        wanted.remove("dummy")
        await until(lambda: [engine for engine, _ in pool._idle] == ["numpy"])
        await until(lambda: runners() == idle(pool))
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
    assert not runners()


async def test_an_engine_that_cannot_be_imported_costs_no_other_one_its_spare() -> None:
    pool = spares.SparePool(1, lambda: ["nothing-here", "dummy"])
    keeping = asyncio.create_task(pool.keep())
    try:
        await until(lambda: [engine for engine, _ in pool._idle] == ["dummy"])
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def test_a_node_wants_spares_of_its_engine_and_of_engines_of_plans_that_it_can_run(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        around = node._hosting.host._around
        assert around.engines() == ("dummy",)
        await node.instances.create(InstanceSpec(MODEL))
        assert around.engines() == ("dummy",), "its plan names the same engine"


async def test_there_is_none_unless_it_was_asked_for(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        await node.instances.create(InstanceSpec(MODEL))
        assert len(runners()) == 1 and not idle(node._hosting.host._starter.spares)
