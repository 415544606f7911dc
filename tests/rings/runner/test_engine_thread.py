"""The loop in the engine's thread, and beside it: who runs where, and that a ring gives the same text all the while."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import uvloop

from exo_mesh.domain.frame import Frame, Row
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import StageInput, StageOutput
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner import callers as callers_module
from exo_mesh.rings.runner import step_mode
from exo_mesh.rings.runner import worker as worker_module
from exo_mesh.rings.runner.driver import Driver
from exo_mesh.rings.runner.engine_thread import EngineThread
from exo_mesh.rings.runner.inbox import Submit
from exo_mesh.rings.runner.mailbox import Mailbox
from exo_mesh.rings.runner.scheduling.kv_budget import KvBudget
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.rings.runner.stage_setup import StageSetup
from exo_mesh.rings.runner.step_mode import StepMode
from exo_mesh.rings.runner.worker import Worker
from tests.rings.runner.test_stage_and_driver import Caller, TinyEngine, expected, ids, request

BALLOT = Ballot(1, "test")
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_loop_moves_and_the_engine_stays(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    thread = EngineThread()
    seen: list[tuple[int, int]] = []

    async def main() -> str:
        for parts in (False, True):
            if parts:
                thread.part()
                thread.part()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            seen.append((threading.get_ident(), await thread.call(threading.get_ident)))
        return "done"

    assert thread.run(main(), new_loop) == "done"
    (loop_before, engine_before), (loop_after, engine_after) = seen
    assert loop_before == engine_before == engine_after == threading.get_ident() != loop_after


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_loop_comes_back_after_all_jobs(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    thread = EngineThread()
    done: list[int] = []

    async def main() -> list[int]:
        threads = []
        for turn in range(6):
            move = (thread.part, thread.rejoin)[turn % 2]
            move()
            move()
            if thread.apart:
                thread.submit(lambda: done.append(threading.get_ident()))
            for _ in range(3):
                await asyncio.sleep(0)
            threads.append(threading.get_ident())
            assert await thread.call(threading.get_ident) == engine
        thread.part()
        thread.rejoin()
        thread.part()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert thread.apart
        return threads

    engine = threading.get_ident()
    seen = thread.run(main(), new_loop)
    assert [ident == engine for ident in seen] == [False, True] * 3
    assert done == [engine] * 6, "the jobs of a turn that ends with rejoin are done, too"


@pytest.mark.parametrize("parts", [False, True])
def test_what_goes_wrong_reaches_whoever_asked(parts: bool) -> None:
    thread = EngineThread()

    def fail() -> None:
        raise EngineError("no such device")

    async def main() -> None:
        if parts:
            thread.part()
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="no such device"):
            await thread.call(fail)
        raise ValueError("the end")

    with pytest.raises(ValueError, match="the end"):
        thread.run(main(), asyncio.new_event_loop)


class SlowEngine(TinyEngine):
    """Takes 3 ms for a forward, as a device would, and notes its threads."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__(first, last)
        self.threads: set[int] = set()
        self.takes_s = 0.003

    def forward(self, stage_input: StageInput) -> StageOutput:
        self.threads.add(threading.get_ident())
        time.sleep(self.takes_s)
        return super().forward(stage_input)

    def close(self) -> None:
        self.threads.add(threading.get_ident())


def workers(engines: list[SlowEngine], thread: EngineThread) -> list[Worker]:
    """A ring in one process, as after its load; only the last worker's loop may move, for they share it."""
    count = len(engines)
    stages = tuple(StagePlan(f"p{i}", "tiny", Shard("m", i, i + 1, count), 0) for i in range(count))
    plan = Plan("i", BALLOT, "m", "digest", stages, 512, PlanInputs((), "memory", 1))
    ring = []
    for index, engine in enumerate(engines):
        worker = Worker(StageSetup(plan, index, Path(), {}, 64), thread if index == count - 1 else None)
        worker.engine, worker._stage = engine, Stage(engine, index)
        worker._budget = KvBudget(engine, 0, 10_000)
        ring.append(worker)
    ring[-1].driver = Driver(BALLOT, SchedulerLimits(count), ring[-1]._outbox.append)
    return ring


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_slow_ring_gives_the_text_of_a_quick_one(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are slow, so stages read ahead and the driver's loop moves while requests come, run and end. On a busy
    machine there are pauses between them, which count for nothing here."""
    monkeypatch.setattr(step_mode, "PAUSE", math.inf)
    thread = EngineThread()
    engines = [SlowEngine(i == 0, i == num_stages - 1) for i in range(num_stages)]
    loops: list[int] = []
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5], list(range(40)), [3], [5, 8]]

    async def main() -> list[list[int]]:
        ring = workers(engines, thread)
        running = [asyncio.create_task(worker.run(ring[(i + 1) % num_stages].accept)) for i, worker in enumerate(ring)]
        loops.append(threading.get_ident())
        callers = [Caller() for _ in prompts]
        for number, (caller, prompt) in enumerate(zip(callers, prompts, strict=True)):
            ring[-1].inbox.put_nowait(Submit(request(f"r{number}", prompt, tokens=12), caller.mailbox))
        events = await asyncio.gather(*(caller.collect() for caller in callers))
        loops.append(threading.get_ident())
        await _removed(ring)
        await _end(running)
        await ring[-1].close()
        return [ids(one) for one in events]

    assert thread.run(main()) == [expected(prompt, 12, num_stages) for prompt in prompts]
    assert loops[0] == threading.get_ident() != loops[1], "the loop has moved"
    assert engines[-1].threads == {threading.get_ident()}, "the engine has not"
    assert [len(engine.kv) for engine in engines] == [0] * num_stages


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_ring_that_gets_quick_again_computes_inline_again(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any step counts as quick once the engines no longer wait, also one that other processes have held up."""
    monkeypatch.setattr(step_mode, "PAUSE", math.inf)
    thread = EngineThread()
    engines = [SlowEngine(i == 0, i == num_stages - 1) for i in range(num_stages)]
    seen: list[bool] = []

    async def main() -> list[int]:
        ring = workers(engines, thread)
        running = [asyncio.create_task(worker.run(ring[(i + 1) % num_stages].accept)) for i, worker in enumerate(ring)]
        caller = Caller()
        tokens = 2 * step_mode.FREE_STEPS
        ring[-1].inbox.put_nowait(Submit(request("r", [3, 1, 4], tokens=tokens), caller.mailbox))
        answer = asyncio.create_task(caller.collect())
        async with asyncio.timeout(20):
            while not thread.apart:
                await asyncio.sleep(0)
            seen.append(threading.get_ident() != main_thread)
            for engine in engines:
                engine.takes_s = 0.0
            monkeypatch.setattr(step_mode, "SLOW_S", math.inf)
            events = await answer
            assert [worker._modes.mode for worker in ring] == [StepMode.INLINE] * num_stages
            while thread.apart:
                await asyncio.sleep(0)
        await _removed(ring)
        await _end(running)
        return ids(events)

    main_thread = threading.get_ident()
    assert thread.run(main()) == expected([3, 1, 4], 2 * step_mode.FREE_STEPS, num_stages)
    assert not thread.apart


class FitfulEngine(SlowEngine):
    """Takes a millisecond for a forward, or none, so that its loop moves to and fro."""

    def __init__(self, seed: int) -> None:
        super().__init__(True, True)
        self._random = random.Random(seed)

    def forward(self, stage_input: StageInput) -> StageOutput:
        if self._random.random() < 0.2:
            self.takes_s = self._random.choice((0.0, 0.001))
        return super().forward(stage_input)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_while_the_loop_moves_get_their_texts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads take turns at the driver, and queue frames."""
    for name, value in (("PAUSE", math.inf), ("BUSY_STEPS", 1), ("FREE_STEPS", 2), ("SLOW_S", 0.0005)):
        monkeypatch.setattr(step_mode, name, value)
    thread, drawn = EngineThread(), random.Random(seed)
    prompts = [[drawn.randrange(50) for _ in range(drawn.randrange(1, 80))] for _ in range(24)]
    moves: list[bool] = []

    async def main() -> list[list[int]]:
        worker = workers([FitfulEngine(seed)], thread)[0]
        running = [asyncio.create_task(worker.run(worker.accept))]
        callers = [Caller() for _ in prompts]
        answers = []
        for number, (caller, prompt) in enumerate(zip(callers, prompts, strict=True)):
            worker.inbox.put_nowait(Submit(request(f"r{number}", prompt, tokens=12), caller.mailbox))
            answers.append(asyncio.create_task(caller.collect()))
            for _ in range(drawn.randrange(20)):
                await asyncio.sleep(0)
                moves.append(thread.apart)
        events = await asyncio.gather(*answers)
        await _removed([worker])
        await _end(running)
        return [ids(one) for one in events]

    assert thread.run(main()) == [expected(prompt, 12, 1) for prompt in prompts]
    assert len(set(moves)) == 2, "it has moved"


def test_the_steps_of_a_ring_of_one_stage_do_not_wake_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what callers must hear at once does: the first token and the end. The engine's thread draws the others."""
    monkeypatch.setattr(step_mode, "PAUSE", math.inf)
    monkeypatch.setattr(callers_module, "FLUSH_EVERY_S", 3600.0)
    thread = EngineThread()
    calls: list[Callable[..., object]] = []
    tell_loop = thread.tell_loop
    monkeypatch.setattr(thread, "tell_loop", lambda what, *rest: (calls.append(what), tell_loop(what, *rest)))

    async def main() -> list[int]:
        worker = workers([SlowEngine(True, True)], thread)[0]
        running = [asyncio.create_task(worker.run(worker.accept))]
        caller = Caller()
        worker.inbox.put_nowait(Submit(request("r", [3, 1, 4], tokens=64), caller.mailbox))
        events = await caller.collect()
        await _removed([worker])
        await _end(running)
        return ids(events)

    assert thread.run(main()) == expected([3, 1, 4], 64, 1)
    assert 1 <= len(calls) < 8


async def _end(running: Sequence[asyncio.Task[None]]) -> None:
    """Cancel workers, which none has ended by itself."""
    for task in running:
        assert not task.done()
        task.cancel()
    await asyncio.wait(running)


async def _removed(ring: list[Worker]) -> None:
    """Until every stage has heard that the last sequence has ended."""
    async with asyncio.timeout(5):
        while any(worker.engine.sequences() for worker in ring if worker.engine is not None):
            await asyncio.sleep(0.01)


def test_an_error_in_the_engines_thread_ends_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_mode, "PAUSE", math.inf)
    thread = EngineThread()

    class Broken(SlowEngine):
        def remove(self, sequence: int) -> None:
            raise RuntimeError("no such sequence")

    engines: list[SlowEngine] = [SlowEngine(True, False), Broken(False, True)]

    async def main() -> None:
        ring = workers(engines, thread)
        first = asyncio.create_task(ring[0].run(ring[1].accept))
        await asyncio.sleep(0)
        mailbox = Mailbox()
        ring[1].inbox.put_nowait(Submit(request("r", [1, 2], tokens=20), mailbox))
        try:
            with pytest.raises(RuntimeError, match="no such sequence"):
                async with asyncio.timeout(5):
                    await ring[1].run(ring[0].accept)
        finally:
            first.cancel()
            await asyncio.wait({first})

    thread.run(main())
    assert thread.apart


def test_a_stage_parts_where_chunks_take_long_to_compute_and_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer of a chunk over a slow link is to overlap with the computing of the next one."""
    monkeypatch.setattr(worker_module, "SLOW_S", 0.0)
    monkeypatch.setattr(step_mode, "SLOW_S", 0.0)
    thread = EngineThread()
    sent: list[int] = []

    async def main() -> None:
        worker = workers([SlowEngine(True, False), SlowEngine(False, True)], EngineThread())[0]
        worker._thread = thread

        async def send(frame: Frame) -> None:
            await asyncio.sleep(0)
            sent.append(frame.step)

        running = asyncio.create_task(worker.run(send))
        for step in range(1, 5):
            worker.engine.insert(step, 100)  # type: ignore[union-attr]
            await worker.accept(Frame(BALLOT, step, (Row(step, 0, 40),), (1,) * 40))
        async with asyncio.timeout(5):
            while len(sent) < 4:
                await asyncio.sleep(0.01)
        await _end([running])

    thread.run(main())
    assert sent == [1, 2, 3, 4]
    assert thread.apart
