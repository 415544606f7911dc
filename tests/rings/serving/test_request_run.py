"""The states of a request, told as transcripts: what its rings answer, and what the request makes of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from exo_mesh.base.telemetry.request_metrics import RequestMetrics
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.request import (
    DriverEvent,
    FinishReason,
    GenerateRequest,
    Prefilled,
    PrefixReport,
    Progress,
    Queued,
    RequestEvent,
    TokenEvent,
    Tokens,
)
from exo_mesh.domain.routing.speed import Speed
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.errors import (
    CancelledRequestError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    MemoryPressureError,
    MeshError,
    OverloadError,
    PlacementError,
    StageLostError,
)
from exo_mesh.rings.serving.dispatcher import Dispatcher
from exo_mesh.rings.serving.instance_timing import LegTimes
from exo_mesh.rings.serving.journal import Journal, JournalEntry
from exo_mesh.rings.serving.request_run import NEXT_STATES, Patience, RequestRun, RunState
from exo_mesh.wire.control_driver import DriverStreamError

STAGE = StagePlan("peer", "dummy", Shard("m", 0, 4, 4), 0)
INSTANCE = InstanceInfo(
    Plan("m-1", Ballot(1, "peer"), "m", "digest", (STAGE,), 100, PlanInputs((), "memory", 1), 400),
    InstanceState.READY,
    ("127.0.0.1:1",),
)
SILENT = "silent"
"""In a script: the driver says nothing more."""

Script = Sequence[DriverEvent | MeshError | str]


def tokens(first: int, count: int = 1, *, end: bool = False) -> Tokens:
    events = [TokenEvent(index, 100 + index) for index in range(first, first + count)]
    if end:
        events[-1] = TokenEvent(events[-1].index, events[-1].token_id, finish=FinishReason.STOP)
    return Tokens(tuple(events))


class ScriptedCall:
    """A driver that says what a script has."""

    def __init__(self, script: Script) -> None:
        self._script = list(script)
        self._error = asyncio.get_running_loop().create_future()
        self.deadline = math.inf
        self.closed = False
        self.prefix: PrefixReport | None = None

    async def read(self) -> DriverEvent:
        if self._error.done() or self._script[0] is SILENT:
            return cast(DriverEvent, await self._error)
        item = self._script.pop(0)
        if isinstance(item, MeshError):
            raise item
        return cast(DriverEvent, item)

    def overdue(self, now: float) -> MeshError | None:
        return None

    def interrupt(self, error: BaseException) -> None:
        if not self._error.done():
            self._error.set_exception(error)

    async def aclose(self) -> None:
        self._error.cancel()
        self.closed = True


class ScriptedRings:
    """Each call to a driver gets the next script. redials: what waiting for a redial raises, if anything."""

    def __init__(self, scripts: Sequence[Script], redials: Sequence[MeshError | None] = ()) -> None:
        self.prompts: list[str] = []
        self._scripts = list(scripts)
        self._redials = list(redials)
        self.calls: list[ScriptedCall] = []
        self.asked: list[GenerateRequest] = []
        self.avoided = 0
        self.refused: tuple[InstanceInfo, MemoryPressureError] | None = None
        self.full: frozenset[str] = frozenset()
        self.others = self.better = False
        self.speed = Speed()
        self.deleted = False
        self.placing_fails: MeshError | None = None
        self.placed = asyncio.Event()
        self.placed.set()
        self.under_way = ("loading", 0, 0)
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    async def find(
        self,
        entry: JournalEntry,
        refused: tuple[InstanceInfo, MemoryPressureError] | None = None,
        full: frozenset[str] = frozenset(),
    ) -> InstanceInfo:
        self.refused, self.full = refused, full
        if not self.placed.is_set():
            await self.placed.wait()
        if self.placing_fails is not None:
            raise self.placing_fails
        return INSTANCE

    def computed(self, entry: JournalEntry, instance: InstanceInfo) -> None:
        self.prompts.append(instance.plan.instance_id)

    def has_room_besides(self, entry: JournalEntry, full: frozenset[str]) -> bool:
        return self.others

    def moves(self, entry: JournalEntry, instance: InstanceInfo, full: frozenset[str]) -> bool:
        return self.better

    def leg(self, entry: JournalEntry, instance: InstanceInfo) -> LegTimes:
        return LegTimes(self.speed, 3, 0, lambda: 1, self.clock)

    def progress(self, model: str) -> tuple[str, int, int]:
        return self.under_way

    def is_deleted(self, instance: InstanceInfo) -> bool:
        return self.deleted

    def avoid(self, instance: InstanceInfo) -> None:
        self.avoided += 1

    def redial(self, instance: InstanceInfo) -> Any:
        return self

    def address(self, endpoint: str) -> str:
        return endpoint

    def heard(self) -> None:
        pass

    async def wait(self, num_tokens: int) -> None:
        if (error := self._redials.pop(0)) is not None:
            raise error

    def call(self, address: str, instance: InstanceInfo, request: GenerateRequest, *rest: Any) -> ScriptedCall:
        self.asked.append(request)
        self.calls.append(ScriptedCall(self._scripts.pop(0)))
        return self.calls[-1]


def begin(rings: ScriptedRings, max_tokens: int = 20) -> tuple[RequestRun, JournalEntry]:
    entry = Journal().open(GenerateRequest("r", (1, 2, 3), max_tokens), "m", 0.0)
    return RequestRun(
        entry, cast(Dispatcher, rings), Patience(max_resumes=2, total_s=60), RequestMetrics().enter("m")
    ), entry


async def follow(run: RequestRun) -> tuple[list[RunState], list[RequestEvent], MeshError | None]:
    """(states in order without repeats, events, the error that ended it)."""
    states, events, error = [run.state], list[RequestEvent](), None
    try:
        while run.state is not RunState.ENDED:
            events += await run.step()
            states += [run.state] if run.state is not states[-1] else []
    except MeshError as exc:
        error = exc
    await run.aclose()
    return states, events, error


def ids(events: Sequence[RequestEvent]) -> list[int | None]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


async def test_an_answer_without_trouble() -> None:
    rings = ScriptedRings([[Queued(2, 4, 1.5), Prefilled(3), tokens(0, 2), tokens(2, end=True)]])
    states, events, error = await follow(begin(rings)[0])
    assert (states, error) == ([RunState.REPLAYING, RunState.PLACING, RunState.ON_RING, RunState.ENDED], None)
    assert events[:2] == [Progress("queued", 2, 4, 1.5), Progress("prefill", 3, 3)]
    assert ids(events) == [100, 101, 102]
    assert rings.calls[0].closed


async def test_the_time_of_a_request_does_not_run_while_its_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.rings.serving.request_run.PROGRESS_EVERY_S", 0.0)
    rings = ScriptedRings([[tokens(0, end=True)]])
    rings.placed.clear()
    run, _ = begin(rings)
    await run.step()
    for done in (1, 2, 2):
        rings.now, rings.under_way = rings.now + 59, ("fetching", done, 9)
        assert run.check(rings.now) > rings.now, "bytes came within the last 60 s"
        assert await run.step() == [Progress("fetching", done, 9)]
    assert run.check(rings.now + 1) == math.inf, "nothing has come for 60 s"
    with pytest.raises(DeadlineError):
        await run.step()
    await run.aclose()


async def test_a_broken_stream_is_called_again_under_another_id_and_goes_on_after_the_last_token() -> None:
    rings = ScriptedRings([[tokens(0, 2), DriverStreamError("cut")], [tokens(1, 3, end=True)]], redials=[None])
    states, events, error = await follow(begin(rings)[0])
    assert states[2:] == [RunState.ON_RING, RunState.REDIALLING, RunState.ON_RING, RunState.ENDED] and error is None
    assert ids(events) == [100, 101, 102, 103], "a repeated token is dropped"
    assert [one.request_id for one in rings.asked] == ["r", "r~1"]
    assert rings.asked[1].resume_ids == (100, 101) and rings.asked[1].resumed
    assert rings.avoided == 0


async def test_a_ring_that_is_short_of_memory_sends_a_new_request_to_another_one() -> None:
    refusal = MemoryPressureError("stage 0 is short of memory")
    rings = ScriptedRings([[refusal], [tokens(0, 2, end=True)]])
    states, events, error = await follow(begin(rings)[0])
    assert states[2:] == [RunState.ON_RING, RunState.PLACING, RunState.ON_RING, RunState.ENDED] and error is None
    assert ids(events) == [100, 101]
    assert rings.refused == (INSTANCE, refusal) and rings.avoided == 0
    assert [one.resumed for one in rings.asked] == [False, False], "it queues there as any other"


async def test_an_answer_that_loses_its_memory_goes_on_where_there_is_room() -> None:
    rings = ScriptedRings([[tokens(0, 2), MemoryPressureError("full")], [tokens(2, end=True)]])
    _, events, error = await follow(begin(rings)[0])
    assert error is None and ids(events) == [100, 101, 102] and rings.refused is not None
    assert rings.asked[1].resumed and rings.asked[1].resume_ids == (100, 101), "it was accepted, and is not again"


async def test_an_answer_without_memory_anywhere_ends_with_what_it_has() -> None:
    rings = ScriptedRings([[tokens(0, 2), MemoryPressureError("full")], [MemoryPressureError("full, too")]])
    run, entry = begin(rings)
    states, events, error = await follow(run)
    assert error is None and ids(events) == [100, 101, None] and states[-1] is RunState.ENDED
    assert isinstance(events[-1], TokenEvent) and events[-1].finish is FinishReason.LENGTH
    journal = Journal()
    journal.close(entry, "length", 1.0)
    assert journal.history.recent(1)[0].describe()["status"] == "pressure_abort"


async def test_a_request_that_two_rings_refuse_for_memory_ends_with_that() -> None:
    rings = ScriptedRings([[MemoryPressureError("one")], [MemoryPressureError("two")]])
    _, _, error = await follow(begin(rings)[0])
    assert isinstance(error, MemoryPressureError) and str(error) == "two"


@pytest.mark.parametrize("loss", ["at once", "after a redial"])
async def test_a_lost_ring_is_avoided_and_another_one_goes_on(loss: str) -> None:
    lost = StageLostError("gone")
    first = [tokens(0), lost if loss == "at once" else DriverStreamError("cut")]
    rings = ScriptedRings([first, [tokens(1, end=True)]], redials=[lost])
    states, events, error = await follow(begin(rings)[0])
    assert states[-4:] == [RunState.RESUMING, RunState.PLACING, RunState.ON_RING, RunState.ENDED] and error is None
    assert ids(events) == [100, 101]
    assert rings.avoided == 1 and all(call.closed for call in rings.calls)


async def test_a_request_whose_rings_are_lost_again_and_again_ends_with_the_loss() -> None:
    lost = StageLostError("gone")
    rings = ScriptedRings([[lost]] * 5)
    states, _, error = await follow(begin(rings)[0])
    assert error is lost and states.count(RunState.RESUMING) == 3, "max_resumes is 2"


async def test_a_request_that_gets_tokens_between_losses_continues_after_any_number_of_them() -> None:
    rings = ScriptedRings([*([tokens(index), StageLostError("gone")] for index in range(6)), [tokens(6, end=True)]])
    states, events, error = await follow(begin(rings)[0])
    assert error is None and states[-1] is RunState.ENDED and states.count(RunState.RESUMING) == 6
    assert ids(events) == [100 + index for index in range(7)]


@pytest.mark.parametrize("error", [EngineError("no"), OverloadError("later"), DeadlineError("late")])
async def test_what_a_driver_refuses_ends_the_request(error: MeshError) -> None:
    rings = ScriptedRings([[error]])
    states, events, ended_by = await follow(begin(rings)[0])
    assert ended_by is error and states[-1] is RunState.ON_RING and not events
    assert rings.calls[0].closed


async def test_a_full_queue_sends_a_request_without_a_token_to_another_instance() -> None:
    rings = ScriptedRings([[Queued(3, 3), OverloadError("full")], [tokens(0, 2, end=True)]])
    rings.others = True
    states, events, error = await follow(begin(rings)[0])
    assert states[2:] == [RunState.ON_RING, RunState.PLACING, RunState.ON_RING, RunState.ENDED] and error is None
    assert ids(events) == [100, 101]
    assert rings.full == {"m-1"} and rings.avoided == 0, "it is asked no more by this request, but by others"
    assert [(one.request_id, one.resumed) for one in rings.asked] == [("r", False), ("r~1", False)]


async def test_a_waiting_request_moves_to_an_instance_that_has_room() -> None:
    rings = ScriptedRings([[Queued(3, 3), SILENT], [Queued(1, 1), tokens(0, 2, end=True)]])
    run, _ = begin(rings)
    while not run._is_queued:
        await run.step()
    run.check(1.0)
    waiting = asyncio.create_task(run.step())
    rings.better = True
    assert run.check(5.0) == 5.0 and not waiting.done(), "it moves with the next check"
    run.check(5.05)
    assert await waiting == []
    rings.better = False
    states, events, error = await follow(run)
    assert states == [RunState.PLACING, RunState.ON_RING, RunState.ENDED] and error is None
    assert ids(events) == [100, 101] and rings.full == set() and rings.calls[0].closed
    assert [one.resumed for one in rings.asked] == [False, False], "it queues there as any other"


async def test_a_waiting_request_whose_turn_has_come_unread_stays() -> None:
    """The loop stood still: the message with its turn is there, but the check runs first. The driver has begun."""
    rings = ScriptedRings([[Queued(1, 1), Queued(0), tokens(0, 2, end=True)]])
    run, entry = begin(rings)
    while not run._is_queued:
        await run.step()
    rings.better = True
    run.check(5.0)
    await run.step()
    assert entry.instance_id == "m-1", "it counts here again"
    run.check(5.05)
    states, events, error = await follow(run)
    assert states == [RunState.ON_RING, RunState.ENDED] and error is None and ids(events) == [100, 101]
    assert len(rings.asked) == 1


async def test_a_request_measures_its_instance() -> None:
    rings = ScriptedRings([[Queued(0), tokens(0), tokens(1, 3), tokens(4, end=True)]])
    run, _ = begin(rings)
    while run.state is not RunState.ENDED:
        await run.step()
        rings.now += 0.1
    await run.aclose()
    assert rings.speed.is_known and rings.speed.prompt_token_s * 3 == pytest.approx(0.1)
    assert rings.speed.step.at(1) == pytest.approx(0.1 / 3), "three tokens in one message"


async def test_a_cached_prompt_says_nothing_of_the_speed_of_an_instance() -> None:
    cached = Tokens((TokenEvent(0, 100, cached=2),))
    rings = ScriptedRings([[Queued(0), cached, tokens(1, end=True)]])
    rings.speed.took_first(1000, 1.0, 0.0)
    before = rings.speed.prompt_token_s
    run, entry = begin(rings)
    while run.state is not RunState.ENDED:
        await run.step()
        rings.now += 0.1
    await run.aclose()
    assert rings.speed.prompt_token_s == before and entry.cached_tokens == 2
    assert len(rings.prompts) == 1, "its prompt is known to be there"


async def test_a_model_that_cannot_be_placed_ends_the_request() -> None:
    rings = ScriptedRings([])
    rings.placing_fails = PlacementError("too large")
    assert (await follow(begin(rings)[0]))[2] is rings.placing_fails


async def test_a_ring_without_room_for_the_answer_is_an_error_of_the_request() -> None:
    error = (await follow(begin(ScriptedRings([[]]), max_tokens=98)[0]))[2]
    assert isinstance(error, ContextLengthError) and "98" in str(error)


async def test_a_cancelled_request_ends_while_its_driver_is_silent() -> None:
    rings = ScriptedRings([[tokens(0), SILENT]])
    run, entry = begin(rings)
    following = asyncio.create_task(follow(run))
    while not entry.emitted:
        await asyncio.sleep(0)
    entry.cancelled = True
    entry.wait.interrupt(entry.end_error)
    async with asyncio.timeout(10):
        error = (await following)[2]
    assert isinstance(error, CancelledRequestError) and rings.calls[0].closed
    assert (entry.wait.work, entry.wait.call) == (None, None)


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_after_its_time_a_request_ends_with_what_it_has(num_tokens: int) -> None:
    rings = ScriptedRings([[*([tokens(0, num_tokens)] if num_tokens else []), SILENT]])
    run, entry = begin(rings)
    following = asyncio.create_task(follow(run))
    while run.state is not RunState.ON_RING or len(entry.emitted) < num_tokens:
        await asyncio.sleep(0)
    assert run.check(59.9) == 60.0
    run.check(60.0)
    async with asyncio.timeout(10):
        states, events, error = await following
    if num_tokens:
        assert states[-1] is RunState.ENDED and error is None
        assert events[-1] == TokenEvent(2, None, finish=FinishReason.LENGTH)
    else:
        assert isinstance(error, DeadlineError)
    assert entry.timed_out


def test_every_state_can_be_reached_and_only_the_end_is_final() -> None:
    assert set(NEXT_STATES) == set(RunState)
    assert set[RunState]().union(*NEXT_STATES.values()) == set(RunState) - {RunState.REPLAYING}
    assert [state for state, following in NEXT_STATES.items() if not following] == [RunState.ENDED]
