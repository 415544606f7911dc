"""Long-lived tasks, turns, shared calls, and the watchdog: one timer for many waits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math

import pytest

from exo_mesh.base import tasks
from exo_mesh.base.clock import monotonic
from exo_mesh.base.tasks import MOST_WOKEN_A_ROUND, SharedCalls, TaskOwner, Turns, Watchdog
from exo_mesh.errors import TransportError


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


async def test_a_long_lived_task_survives_what_the_machine_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "FIRST_RETRY_S", 0.001)
    owner = TaskOwner()
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3 + [TimeoutError(), TransportError("no way")]
    settled = asyncio.Event()

    async def work() -> None:
        if failures:
            raise failures.pop(0)
        settled.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING, logger="exo_mesh.base.tasks"):
        task = owner.keep(work, "housekeeping")
        async with asyncio.timeout(10):
            await settled.wait()
    assert not task.done() and not owner.ended
    assert [record.getMessage().partition(" retried: ")[2] for record in caplog.records] == [
        "Too many open files", "TimeoutError", "no way",
    ], "each kind of failure is logged once"  # fmt: skip
    await owner.close()


async def test_a_bug_ends_a_long_lived_task_and_is_remembered() -> None:
    owner = TaskOwner()

    async def work() -> None:
        raise KeyError("x")

    async def done() -> None:
        return

    await asyncio.wait({owner.keep(work, "housekeeping"), owner.keep(done, "Thunderbolt ports")})
    assert owner.ended == {"housekeeping": "KeyError"}
    await owner.close()


async def test_a_burst_of_callers_goes_on_a_few_in_each_round_in_order() -> None:
    turns, went_on = Turns(3), list[int]()

    async def caller(number: int) -> None:
        await turns.take()
        went_on.append(number)

    callers = [asyncio.create_task(caller(number)) for number in range(20)]
    most_a_round, before = 0, 0
    while len(went_on) < 20:
        await asyncio.sleep(0)
        most_a_round, before = max(most_a_round, len(went_on) - before), len(went_on)
    assert went_on == list(range(20)) and most_a_round == 3
    await asyncio.gather(*callers)


async def test_a_cancelled_caller_holds_up_none_behind_it() -> None:
    turns = Turns(1)
    callers = [asyncio.create_task(turns.take()) for _ in range(4)]
    await asyncio.sleep(0)
    callers[1].cancel()
    async with asyncio.timeout(5):
        ended = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(one) for one in ended] == [type(None), asyncio.CancelledError, type(None), type(None)]


async def test_callers_that_ask_for_the_same_share_one_call() -> None:
    calls, begun, goes_on = SharedCalls[int](), list[str](), asyncio.Event()

    async def call() -> int:
        begun.append("x")
        await goes_on.wait()
        return len(begun)

    callers = [asyncio.create_task(calls.get("a", call)) for _ in range(5)]
    await asyncio.sleep(0)
    callers[0].cancel()
    goes_on.set()
    ended = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError) and ended[1:] == [1, 1, 1, 1]
    assert await calls.get("a", call) == 2, "what has ended is asked for again"


@pytest.mark.parametrize("fails", [False, True])
async def test_after_a_shared_call_few_of_its_callers_go_on_in_each_round(fails: bool) -> None:
    calls, goes_on, went_on = SharedCalls[int](), asyncio.Event(), list[int]()

    async def call() -> int:
        await goes_on.wait()
        if fails:
            raise TransportError("no way")
        return 1

    async def caller(number: int) -> None:
        with contextlib.suppress(TransportError):
            await calls.get("a", call)
        went_on.append(number)

    callers = [asyncio.create_task(caller(number)) for number in range(50)]
    await asyncio.sleep(0)
    goes_on.set()
    most_a_round, before = 0, 0
    while len(went_on) < 50:
        await asyncio.sleep(0)
        most_a_round, before = max(most_a_round, len(went_on) - before), len(went_on)
    assert went_on == list(range(50)) and most_a_round == MOST_WOKEN_A_ROUND
    await asyncio.gather(*callers)


async def test_all_who_share_a_call_get_its_error() -> None:
    calls = SharedCalls[int]()

    async def call() -> int:
        raise TransportError("no way")

    ended = await asyncio.gather(*(calls.get("a", call) for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in ended] == ["no way"] * 3


async def test_work_that_finds_nothing_to_do_leaves_its_turn_to_the_next() -> None:
    turns, done = Turns(1), list[int]()

    def work(number: int) -> bool:
        done.append(number)
        return number % 2 == 0

    for number in range(5):
        turns.call(lambda number=number: work(number))
    assert done == [0], "one goes on at once"
    await asyncio.sleep(0)
    assert done == [0, 1, 2]
    await asyncio.sleep(0)
    assert done == [0, 1, 2, 3, 4]
