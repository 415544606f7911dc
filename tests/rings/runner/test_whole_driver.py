"""A whole-model instance answers as a driver does: queue, pieces, end, errors, keys, and continuation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest
from exo_mesh_dummy.text import words_for

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.request import FinishReason, GenerateRequest, Queued, SamplingParams
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.whole.text_pieces import TextInput, TextPiece, TextUsage, text_of
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.engine.contract import LoadProgress
from exo_mesh.engine.whole import WholeLoadRequest
from exo_mesh.errors import EngineError, InputError
from exo_mesh.rings.runner.calls import events_message
from exo_mesh.rings.runner.ring_rest import IDLE_AFTER_S
from exo_mesh.rings.runner.whole.driver import WholeDriver, text_request
from exo_mesh.wire.driver_codec import event_from_proto
from exo_mesh.wire.proto import driver_pb2 as pb

PLAN = Plan(
    "served-1",
    Ballot(1, "a"),
    "served",
    "served:0",
    (StagePlan("peer", "words", Shard("served", 0, 1, 1), 0),),
    4096,
    PlanInputs((), "memory", 1),
)


class Words:
    """An engine that says its words one by one; `gate` holds it back before each word if it is set."""

    def __init__(self, words: list[str], *, slots: int = 1, continues: bool = True) -> None:
        self.slots, self.continues = slots, continues
        self.words = words
        self.gate: asyncio.Semaphore | None = None
        self.asked: list[TextRequest] = []
        self.num_stopped = 0

    async def load(self, request: WholeLoadRequest, progress: LoadProgress) -> None:
        progress(1, 1)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        self.asked.append(request)
        try:
            for word in self.words[len(request.begun) :]:
                if self.gate is not None:
                    await self.gate.acquire()
                yield TextPiece("text", word)
            yield TextEnd(FinishReason.STOP, TextUsage(3, len(self.words)))
        finally:
            self.num_stopped += 1

    async def check(self) -> None:
        pass

    def memory_bytes(self) -> int:
        return 0

    async def close(self) -> None:
        pass


def request(name: str = "r", begun: tuple[TextPiece, ...] = (), key: bytes = b"") -> GenerateRequest:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    text = TextInput(body, begun=begun)
    return GenerateRequest(name, (), 100, SamplingParams(), text=text, key_hash=key, fingerprint=b"f" * 32)


async def collect(driver: WholeDriver, asked: GenerateRequest) -> list[pb.GenerateEvents]:
    async with aclosing(driver.answer(asked)) as updates:
        return [events_message([update]) async for update in updates]


def said(messages: list[pb.GenerateEvents]) -> str:
    events = [event_from_proto(event) for message in messages for event in message.events]
    return text_of(event.piece for event in events if event.piece is not None)


async def test_pieces_are_numbered_and_the_end_has_the_counts_of_the_engine() -> None:
    messages = await collect(WholeDriver(PLAN, Words(["a", "b"]), 10), request())
    events = [event_from_proto(event) for message in messages for event in message.events]
    assert [event.index for event in events] == [0, 1, 2]
    assert (events[-1].finish, events[-1].usage) == (FinishReason.STOP, TextUsage(3, 2))


async def test_a_second_request_waits_with_its_place_until_the_first_has_ended() -> None:
    engine = Words(["a", "b"])
    engine.gate = asyncio.Semaphore(0)
    driver = WholeDriver(PLAN, engine, 10)
    first = asyncio.create_task(collect(driver, request("1")))
    while not engine.asked:
        await asyncio.sleep(0)
    async with aclosing(driver.answer(request("2"))) as second:
        place = (await anext(second)).news
        assert isinstance(place, Queued) and (place.place, place.length) == (1, 1)
        for _ in range(4):
            engine.gate.release()
        assert said(await first) == "ab"
        rest = [update async for update in second]
    assert rest[0].news == Queued(0) and said([events_message([update]) for update in rest]) == "ab"


async def test_an_instance_is_idle_some_time_after_its_last_request() -> None:
    now, engine, uses = 0.0, Words(["a"] * 3), list[float]()
    driver = WholeDriver(PLAN, engine, 10, lambda: uses.append(now), lambda: now)
    now = IDLE_AFTER_S
    assert driver.rest.is_idle
    await collect(driver, request())
    assert uses == [now] and not driver.rest.is_idle
    running = driver.answer(request())
    await anext(running)
    now += 10 * IDLE_AFTER_S
    assert not driver.rest.is_idle, "an answer is under way"
    await running.aclose()
    now += IDLE_AFTER_S
    assert driver.rest.is_idle


async def test_a_caller_that_leaves_stops_the_engine_and_frees_the_slot() -> None:
    engine = Words(["a", "b", "c"])
    driver = WholeDriver(PLAN, engine, 10)
    async with aclosing(driver.answer(request())) as messages:
        await anext(messages)
    assert engine.num_stopped == 1 and driver.slots.num_running == 0


async def test_an_engine_that_continues_gets_the_beginning_and_repeats_nothing() -> None:
    engine = Words(["a", "b", "c"])
    begun = (TextPiece("text", "a"),)
    messages = await collect(WholeDriver(PLAN, engine, 10), request(begun=begun))
    assert said(messages) == "bc" and engine.asked[0].begun == begun
    assert messages[0].events[0].index == 1


async def test_an_engine_that_cannot_continue_is_asked_again_and_the_beginning_is_dropped() -> None:
    engine = Words(["a", "b", "c"], continues=False)
    messages = await collect(WholeDriver(PLAN, engine, 10), request(begun=(TextPiece("text", "ab"),)))
    assert said(messages) == "c" and engine.asked[0].begun == ()


async def test_another_answer_than_before_is_one_typed_error() -> None:
    engine = Words(["x", "y"], continues=False)
    messages = await collect(WholeDriver(PLAN, engine, 10), request(begun=(TextPiece("text", "ab"),)))
    assert [message.error_code for message in messages] == [EngineError.code]


async def test_an_answer_that_ends_without_an_end_is_an_error_and_never_taken_for_whole() -> None:
    class Cut(Words):
        async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
            yield TextPiece("text", "a")

    messages = await collect(WholeDriver(PLAN, Cut([]), 10), request())
    assert messages[-1].error_code == EngineError.code


async def test_a_bug_in_an_engine_ends_the_request_with_a_typed_error() -> None:
    class Broken(Words):
        async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
            yield TextPiece("text", "a")
            raise KeyError("oops")

    messages = await collect(WholeDriver(PLAN, Broken([]), 10), request())
    assert messages[-1].error_code == EngineError.code and "oops" not in messages[-1].error_message


async def test_an_engine_that_never_ends_is_ended() -> None:
    endless = Words(["a"] * 10_000)
    messages = await collect(WholeDriver(PLAN, endless, 10), replace(request(), max_tokens=5))
    assert messages[-1].error_code == EngineError.code and len(messages) < 50


async def test_the_same_key_gets_the_kept_answer_without_the_engine() -> None:
    engine = Words(["a", "b"])
    driver = WholeDriver(PLAN, engine, 10)
    key = b"k" * 32
    first = said(await collect(driver, request("1", key=key)))
    again = await collect(driver, request("2", key=key))
    assert said(again) == first == "ab" and len(engine.asked) == 1
    assert driver.replays.num_tokens(key) == 2
    other = await collect(driver, replace(request("3", key=key), fingerprint=b"o" * 32))
    assert other[-1].error_code == "idempotency_key_reused"


async def test_the_same_key_takes_a_running_answer_over_and_continues_it() -> None:
    engine = Words(["a", "b", "c"], slots=2)
    engine.gate = asyncio.Semaphore(1)
    driver = WholeDriver(PLAN, engine, 10)
    key = b"k" * 32
    first = asyncio.create_task(collect(driver, request("1", key=key)))
    while driver.replays.num_tokens(key) != 1:
        await asyncio.sleep(0)
    second = asyncio.create_task(collect(driver, request("2", key=key)))
    while len(engine.asked) < 2:
        await asyncio.sleep(0)
    for _ in range(5):
        engine.gate.release()
    assert said(await second) == "abc"
    assert (await first)[-1].error_code == "superseded"


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"messages": [], "prompt": "a"}', b"[" * 100_000])
def test_text_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(InputError, match="text of"):
        text_request(replace(request(), text=TextInput(body)))


def test_a_request_as_ids_is_refused() -> None:
    with pytest.raises(InputError, match="takes requests as text"):
        text_request(GenerateRequest("r", (1, 2), 5))


def test_the_dummy_answers_equal_questions_alike() -> None:
    assert words_for("why?", 8) == words_for("why?", 8) != words_for("how?", 8)
