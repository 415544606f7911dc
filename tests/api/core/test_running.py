"""The feed between a generator and its reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from exo_mesh.api.core.running import MAX_AT_ONCE, MAX_BUFFERED, Feed
from exo_mesh.base.clock import monotonic
from exo_mesh.base.tasks import Watchdog
from exo_mesh.errors import EngineError


async def turns(count: int = 200) -> None:
    """Let every task go as far as it can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_feed_holds_no_more_than_its_bound_and_loses_nothing() -> None:
    made = 0

    async def count() -> AsyncGenerator[int, None]:
        nonlocal made
        for made in range(500):
            yield made

    async with Feed([count()], Watchdog()) as feed:
        await turns()
        taken: list[int] = []
        while len(taken) < 500:
            assert made <= len(taken) + MAX_BUFFERED
            taken += [item for _, item in await feed.take()]
            await turns()
        assert taken == list(range(500))
        with pytest.raises(EngineError, match="without a result"):
            await feed.take()


async def test_items_come_before_the_error_that_followed_them() -> None:
    async def fail() -> AsyncGenerator[int, None]:
        yield 1
        raise EngineError("broken")

    async with Feed([fail()], Watchdog()) as feed:
        await turns()
        assert await feed.take() == [(0, 1)]
        with pytest.raises(EngineError, match="broken"):
            await feed.take()


async def test_a_deadline_loses_no_item() -> None:
    go_on = asyncio.Event()

    async def later() -> AsyncGenerator[int, None]:
        await go_on.wait()
        yield 1

    async with Feed([later()], Watchdog(period_s=0.01)) as feed:
        assert await feed.take(monotonic()) == []
        go_on.set()
        assert await feed.take() == [(0, 1)]


@pytest.mark.parametrize("num_read", [0, 1, 100])
async def test_leaving_closes_the_generator_in_its_own_task(num_read: int) -> None:
    tasks: set[object] = set()
    closed = False

    async def endless() -> AsyncGenerator[int, None]:
        nonlocal closed
        try:
            async with asyncio.timeout(60):  # bound to the task that enters it
                while True:
                    tasks.add(asyncio.current_task())
                    yield 1
        finally:
            tasks.add(asyncio.current_task())
            closed = True

    async with Feed([endless()], Watchdog()) as feed:
        for _ in range(num_read):
            await feed.take()
        await turns(3)
    assert closed
    assert len(tasks) == 1


async def test_an_error_after_the_reader_has_left_is_swallowed() -> None:
    """Its request is over already; an unretrieved task error would fail this test run."""

    async def fail_at_close() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            raise EngineError("while closing")

    async with Feed([fail_at_close()], Watchdog()) as feed:
        assert await feed.take() == [(0, 1)]


async def test_several_sources_run_at_once_and_each_item_says_its_own() -> None:
    async def count(start: int) -> AsyncGenerator[int, None]:
        for number in range(start, start + 100):
            yield number

    async with Feed([count(0), count(1000)], Watchdog()) as feed:
        taken: dict[int, list[int]] = {0: [], 1: []}
        while sum(map(len, taken.values())) < 200:
            for index, item in await feed.take():
                taken[index].append(item)
        assert taken == {0: list(range(100)), 1: list(range(1000, 1100))}


async def test_one_request_does_not_run_more_sources_than_its_share() -> None:
    running, most = 0, 0

    async def one() -> AsyncGenerator[int, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        yield 1
        running -= 1

    async with Feed([one() for _ in range(3 * MAX_AT_ONCE)], Watchdog()) as feed:
        taken = 0
        while taken < 3 * MAX_AT_ONCE:
            taken += len(await feed.take())
    assert most == MAX_AT_ONCE
