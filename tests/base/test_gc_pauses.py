"""When a process collects garbage among all its objects."""

from __future__ import annotations

import asyncio
import gc

import pytest

from exo_mesh.base import gc_pauses
from tests.support.nodes import until


async def test_a_collection_that_is_due_waits_until_few_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    num_checks, num_collections = 0, 0

    def collect() -> int:
        nonlocal num_collections
        num_collections += 1
        return 0

    def is_due() -> bool:
        nonlocal num_checks
        num_checks += 1
        return num_collections == 0

    monkeypatch.setattr(gc_pauses, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(gc_pauses, "is_collection_due", is_due)
    monkeypatch.setattr(gc, "collect", collect)
    busy = [asyncio.create_task(asyncio.Event().wait()) for _ in range(gc_pauses.FEW_TASKS)]
    keeping = asyncio.create_task(gc_pauses.collect_while_few())
    try:
        await until(lambda: num_checks >= 3)
        assert not num_collections
        for task in busy:
            task.cancel()
        await until(lambda: num_collections)
        assert num_collections == 1
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, *busy, return_exceptions=True)


def test_collections_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def collect() -> int:
        nonlocal now
        now += 0.02
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    assert gc_pauses.collect(lambda: now) == pytest.approx(2.0)


def test_a_full_collection_is_due_after_as_many_young_ones_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for rounds, is_due in ((0, False), (9, False), (10, True), (99, True)):
        monkeypatch.setattr(gc, "get_count", lambda rounds=rounds: (0, 0, rounds))
        assert gc_pauses.is_collection_due() is is_due
