"""The watchdog: one timer for many waits."""

from __future__ import annotations

import asyncio
import math

from exo_mesh.clock import monotonic
from exo_mesh.tasks import Watchdog


async def test_a_check_is_called_each_period_until_it_is_forgotten() -> None:
    dog = Watchdog(period_s=0.01)
    calls: list[float] = []
    third = asyncio.Event()

    def check(now: float) -> float:
        calls.append(now)
        if len(calls) == 3:
            dog.forget(check)
            third.set()
        return math.inf

    dog.watch(check)
    async with asyncio.timeout(10):
        await third.wait()
    assert calls == sorted(calls)
    assert dog._timer is None, "nothing is watched, so there is no timer"


async def test_a_check_that_asks_for_it_is_called_sooner_than_a_period() -> None:
    dog = Watchdog(period_s=0.01)
    num_calls = 0
    done = asyncio.Event()

    def check(now: float) -> float:
        nonlocal num_calls
        num_calls += 1
        dog._period_s = 3600.0
        if num_calls == 3:
            done.set()
        return now

    dog.watch(check)
    async with asyncio.timeout(10):
        await done.wait()
    dog.forget(check)


async def test_one_timer_serves_all() -> None:
    dog = Watchdog(period_s=0.01)
    seen: set[int] = set()
    all_seen = asyncio.Event()

    def check_of(number: int):  # type: ignore[no-untyped-def]
        def check(now: float) -> float:
            seen.add(number)
            if len(seen) == 100:
                all_seen.set()
            return monotonic() + 1

        return check

    checks = [check_of(number) for number in range(100)]
    for check in checks:
        dog.watch(check)
    timer = dog._timer
    assert timer is not None
    async with asyncio.timeout(10):
        await all_seen.wait()
    for check in checks:
        dog.forget(check)
        dog.forget(check)
    assert dog._timer is None
