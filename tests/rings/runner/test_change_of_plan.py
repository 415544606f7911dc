"""A ring that goes on by a higher ballot: what survives keeps its KV, what is new catches up, and no token is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.frame import Frame, Row
from exo_mesh.domain.plan import Ballot
from exo_mesh.engine.contract import StageInput, StageOutput
from exo_mesh.rings.runner.calls import events_message
from exo_mesh.rings.runner.inbox import Change
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.stage import Stage
from tests.rings.runner.test_stage_and_driver import Caller, Ring, TinyEngine, expected, request
from tests.rings.runner.test_worker import BALLOT, worker_of

HIGHER = Ballot(2, "test")


class CountingEngine(TinyEngine):
    """Counts the tokens that it computes."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__(first, last)
        self.computed = 0

    def forward(self, stage_input: StageInput) -> StageOutput:
        self.computed += len(stage_input.token_ids)
        return super().forward(stage_input)


class LosingRing(Ring):
    """Its stages can be lost, and replaced by empty ones."""

    def __init__(self, num_stages: int, **limits: float) -> None:
        super().__init__(num_stages, **limits)
        self.engines = [CountingEngine(i == 0, i == num_stages - 1) for i in range(num_stages)]
        self.stages = [Stage(engine, i) for i, engine in enumerate(self.engines)]
        self.limits = SchedulerLimits(num_stages, **limits)  # type: ignore[arg-type]

    def lose(self, *lost: int, kept_from: int | None = None, laps_before: int = 0) -> int:
        """After some laps; then nothing that is on its way comes round, and the stages before `kept_from` are empty."""
        num_stages = len(self.stages)
        for _ in range(laps_before):
            self.lap()
        self.on_their_way = list(self.sent)
        for stage in self.stages[: min(lost, default=0)]:
            for frame in self.sent:  # the stages before have computed more than came round
                frame = stage.process(frame).frame
        self.sent.clear()
        kept_from = max(lost, default=-1) + 1 if kept_from is None else kept_from
        for index in range(num_stages):
            if index in lost:
                self.engines[index] = CountingEngine(index == 0, index == num_stages - 1)
                self.stages[index] = Stage(self.engines[index], index)
            elif index < kept_from:
                self.stages[index].forget(list(self.engines[index].kv))
        for engine in self.engines:
            engine.computed = 0  # type: ignore[attr-defined]
        return self.driver.change(HIGHER, self.limits, kept_from)

    def counts(self) -> list[int]:
        return [engine.computed for engine in self.engines]  # type: ignore[attr-defined]


async def texts(ring: Ring, callers: Sequence[Caller]) -> list[list[int]]:
    ring.run()
    return [[event.token_id for event in await caller.collect()] for caller in callers]


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize("laps_before", [0, 1, 3, 9])
async def test_every_text_is_right_whichever_stage_is_lost_and_when(lost: int, laps_before: int) -> None:
    ring = LosingRing(4, prefill_chunk=4)
    prompts = [list(range(n, n + 11)) for n in (1, 5, 9)]
    callers = [Caller() for _ in prompts]
    for number, (caller, prompt) in enumerate(zip(callers, prompts, strict=True)):
        ring.driver.submit(request(f"r{number}", prompt, 6), caller.mailbox)
    resumed = ring.lose(lost, laps_before=laps_before)
    assert resumed == 3
    assert await texts(ring, callers) == [expected(prompt, 6, 4) for prompt in prompts]
    assert ring.kv_rows == 0
    assert all(message.ballot.counter in (1, 2) for caller in callers for message in caller.messages)


async def test_the_stages_after_the_lost_one_compute_nothing_again() -> None:
    ring = LosingRing(3)
    caller = Caller()
    prompt = list(range(20))
    ring.driver.submit(request("r", prompt, 10), caller.mailbox)
    for _ in range(5):  # the prompt with its token, and four more
        ring.lap()
    assert ring.lose(1) == 1
    assert await texts(ring, [caller]) == [expected(prompt, 10, 3)]
    first, fresh, last = ring.counts()
    assert first == fresh == 29, "19 tokens of the prompt, and a row for each of ten tokens"
    assert last == 5, "only what it had not computed before"


async def test_nothing_is_computed_again_when_only_a_hop_was_lost() -> None:
    ring = LosingRing(3)
    caller = Caller()
    prompt = list(range(20))
    ring.driver.submit(request("r", prompt, 10), caller.mailbox)
    for _ in range(5):
        ring.lap()
    ring.lose(kept_from=0)
    assert await texts(ring, [caller]) == [expected(prompt, 10, 3)]
    assert ring.counts() == [5, 5, 5]


async def test_without_rollback_all_is_computed_again() -> None:
    ring = LosingRing(3)
    caller = Caller()
    ring.driver.submit(request("r", list(range(20)), 10), caller.mailbox)
    for _ in range(6):
        ring.lap()
    ring.lose(1, kept_from=3)
    assert await texts(ring, [caller]) == [expected(list(range(20)), 10, 3)]
    assert ring.counts() == [29, 29, 29]


async def test_a_second_loss_while_the_first_is_being_made_good() -> None:
    ring = LosingRing(3, prefill_chunk=4)
    caller = Caller()
    prompt = list(range(20))
    ring.driver.submit(request("r", prompt, 10), caller.mailbox)
    for _ in range(9):
        ring.lap()
    ring.lose(1)
    ring.lap()  # the empty frame or the first chunk
    ring.lose(0, laps_before=1)
    assert await texts(ring, [caller]) == [expected(prompt, 10, 3)]


async def test_a_sequence_that_ended_on_the_lost_frames_is_freed_at_the_survivors() -> None:
    ring = LosingRing(3)
    short, long = Caller(), Caller()
    ring.driver.submit(request("short", [1, 2], 1), short.mailbox)
    ring.driver.submit(request("long", [3, 4], 8), long.mailbox)
    while not short.messages or not short.ended:
        ring.lap()
        if short.mailbox.backlog:
            short.messages.append(events_message(await short.mailbox.next()))
    ring.lose(0)  # with the Remove on its way
    assert await texts(ring, [long]) == [expected([3, 4], 8, 3)]
    assert ring.kv_rows == 0


async def test_a_request_that_waits_keeps_its_place_and_one_that_ran_does_not_wait() -> None:
    ring = LosingRing(2, max_running=2, max_waiting=1)
    callers = [Caller() for _ in range(4)]
    for number, caller in enumerate(callers):
        ring.driver.submit(request(f"r{number}", [number, 7], 5), caller.mailbox)
    ring.driver.callers.deliver()
    callers[3].messages.append(events_message(await callers[3].mailbox.next()))
    assert callers[3].error == "overloaded", "the queue is full"
    ring.lose(0, laps_before=3)
    assert await texts(ring, callers[:3]) == [expected([number, 7], 5, 2) for number in range(3)]


async def test_frames_of_the_old_ballot_are_dropped_by_a_stage_that_goes_on() -> None:
    engine = TinyEngine(True, False)
    worker = worker_of(engine)
    sent: list[Frame] = []

    async def send(frame: Frame) -> None:
        sent.append(frame)

    running = asyncio.create_task(worker.run(send))
    await asyncio.sleep(0)
    engine.kv[9] = [1, 2, 3]
    told: list[int] = []
    setup = replace(worker._setup, plan=replace(worker._setup.plan, ballot=HIGHER), model_dir=Path())
    worker.change(Change(setup, 2, told.append))
    await worker.accept(Frame(BALLOT, 1, (Row(9, 3, 1),), (5,)))
    await worker.accept(Frame(HIGHER, 1, (Row(9, 0, 1),), (5,)))
    async with asyncio.timeout(5):
        while not sent:
            await asyncio.sleep(0.001)
    assert told == [0] and [frame.ballot for frame in sent] == [HIGHER]
    assert sent[0].faults[0].sequence == 9, "its KV is gone"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_request_that_is_cancelled_before_its_next_turn_leaves_nothing_at_the_survivors() -> None:
    """Stages hold it over the change of the plan, but it waits for its place when it ends."""
    ring = LosingRing(3)
    callers = [Caller() for _ in range(2)]
    for number, caller in enumerate(callers):
        ring.driver.submit(request(f"r{number}", [number, 7, 8], 5), caller.mailbox)
    for _ in range(3):
        ring.lap()
    ring.limits = replace(ring.limits, max_running=1)
    ring.lose(0)
    assert ring.driver.num_waiting == 1
    waiting = next(iter(ring.driver._scheduler.waiting)).id - 1
    ring.driver.cancel(f"r{waiting}", callers[waiting].mailbox)
    await texts(ring, [callers[1 - waiting]])
    assert ring.kv_rows == 0
