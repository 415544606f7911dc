"""Stages and a driver in one thread: what happens to rows, ops, faults and requests, with a small, clear engine.

`TinyEngine` is a whole engine of the contract: its hidden state is the running sum of all token ids of a sequence, each
stage adds 1, and the last one puts its logit on (sum + stages) % vocab. Text therefore shows every lost or doubled
token, and every stage that was left out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from exo_mesh.domain.frame import HIDDEN, Fault, Frame, Insert, Keep, UnknownOp
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import ANY_POSITION, Capabilities, LoadProgress, LoadRequest, StageInput, StageOutput
from exo_mesh.rings.runner.calls import events_message
from exo_mesh.rings.runner.driver import Driver
from exo_mesh.rings.runner.mailbox import Mailbox
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.wire.proto import driver_pb2 as pb
from tests.support.serving import Answers

VOCAB = 50
MOST_STAGES = 64
"""A hidden state is sum * MOST_STAGES + stages, exact in float32 up to a sum of 262,143."""
BALLOT = Ballot(1, "test")


class TinyEngine:
    capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=("float32",))

    def __init__(self, first: bool, last: bool) -> None:
        self.first, self.last = first, last
        self.kv: dict[int, list[int]] = {}
        self.refuse: set[int] = set()
        self.crash = False

    def load(self, request: LoadRequest, progress: LoadProgress) -> None: ...

    def insert(self, sequence: int, max_tokens: int) -> None:
        self.kv.setdefault(sequence, [])

    def forward(self, stage_input: StageInput) -> StageOutput:
        if self.crash:
            raise RuntimeError("the device fell over")
        hidden, logits, faults, start = [], [], [], 0
        incoming = None if self.first else stage_input.tensors[HIDDEN].numpy()
        for row in stage_input.rows:
            ids = list(stage_input.token_ids[start : start + row.n])
            cached = self.kv.get(row.sequence)
            if cached is None or row.sequence in self.refuse or row.pos0 > len(cached):
                faults.append(Fault(row.sequence, 0, "bad_row", "no such row"))
                sums = [0.0] * row.n
            else:
                self.kv[row.sequence] = cached = cached[: row.pos0] + ids
                sums = [float(sum(cached[: row.pos0 + i + 1])) for i in range(row.n)]
            if incoming is not None:
                assert faults or [x // MOST_STAGES for x in incoming[start : start + row.n, 0]] == sums
                sums = incoming[start : start + row.n, 0].tolist()
            else:
                sums = [total * MOST_STAGES for total in sums]
            hidden += [total + 1 for total in sums]
            for value in hidden[len(hidden) - row.num_logits :] if row.num_logits else []:
                one = np.zeros(VOCAB, np.float32)
                one[int(value // MOST_STAGES + value % MOST_STAGES) % VOCAB] = 1
                logits.append(one)
            start += row.n
        if self.last:
            return StageOutput(logits=np.array(logits, np.float32).reshape(-1, VOCAB), faults=tuple(faults))
        array = np.array(hidden, np.float32).reshape(-1, 1)
        return StageOutput({HIDDEN: Tensor.from_numpy(array)}, faults=tuple(faults))

    def remove(self, sequence: int) -> None:
        self.kv.pop(sequence, None)

    def sequences(self) -> Sequence[int]:
        return list(self.kv)

    def memory_bytes(self) -> int:
        return 0

    def close(self) -> None: ...


class Ring:
    """All stages and the driver, driven by hand: one frame at a time goes the whole way round."""

    def __init__(self, num_stages: int, **limits: float) -> None:
        self.engines = [TinyEngine(i == 0, i == num_stages - 1) for i in range(num_stages)]
        self.stages = [Stage(engine, i) for i, engine in enumerate(self.engines)]
        self.sent: deque[Frame] = deque()
        self.driver = Driver(BALLOT, SchedulerLimits(num_stages, **limits), self.sent.append)

    def lap(self) -> None:
        frame, logits, hidden = self.sent.popleft(), None, None
        for stage in self.stages:
            result = stage.process(frame)
            frame, logits, hidden = result.frame, result.logits, result.hidden
        self.driver.returned(frame, logits, hidden)
        self.driver.callers.deliver()

    def run(self) -> None:
        self.driver.callers.deliver()
        while self.sent:
            self.lap()

    @property
    def kv_rows(self) -> int:
        return sum(len(engine.kv) for engine in self.engines)


def request(name: str, prompt: Sequence[int], tokens: int = 8, **changes: object) -> GenerateRequest:
    options = {"sampling": SamplingParams(temperature=0), **changes}
    return GenerateRequest(name, tuple(prompt), tokens, **options)  # type: ignore[arg-type]


def expected(prompt: Sequence[int], tokens: int, stages: int) -> list[int]:
    context = list(prompt)
    for _ in range(tokens):
        context.append((sum(context) + stages) % VOCAB)
    return context[len(prompt) :]


class Caller:
    """The waiting side of a request."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.messages: list[pb.GenerateEvents] = []

    async def collect(self) -> list[pb.TokenEvent]:
        """All events; waits for the end."""
        async with asyncio.timeout(5):
            while not self.ended:
                self.messages.append(events_message(await self.mailbox.next()))
        return [event for message in self.messages for event in message.events]

    @property
    def ended(self) -> bool:
        return any(m.error_code or any(event.finish for event in m.events) for m in self.messages)

    @property
    def error(self) -> str:
        return self.messages[-1].error_code


def ids(events: list[pb.TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.HasField("token_id")]


async def test_an_engine_that_takes_only_rows_of_one_length_gets_them_so() -> None:
    class Plain(TinyEngine):
        capabilities = Capabilities(ragged=False, rollback=ANY_POSITION, dtypes=("float32",))

        def forward(self, stage_input: StageInput) -> StageOutput:
            assert len({row.n for row in stage_input.rows}) == 1
            return super().forward(stage_input)

    ring, callers = Ring(3), [Caller() for _ in range(4)]
    ring.stages[1] = Stage(Plain(False, False), 1)
    ring.stages[2] = Stage(Plain(False, True), 2)
    prompts = [list(range(1, size + 1)) for size in (3, 9, 9, 4)]
    for number, (prompt, caller) in enumerate(zip(prompts, callers, strict=True)):
        ring.driver.submit(request(f"r{number}", prompt), caller.mailbox)
    assert len(ring.sent[0].rows) == 1, "the first prompt left before the others came"
    ring.run()
    for prompt, caller in zip(prompts, callers, strict=True):
        assert ids(await caller.collect()) == expected(prompt, 8, 3)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
async def test_concurrent_requests_get_the_text_that_each_gets_alone(num_stages: int) -> None:
    ring = Ring(num_stages, prefill_chunk=3)
    prompts = [list(range(1, size + 1)) for size in (1, 2, 5, 9, 14)]
    callers = [Caller() for _ in prompts]
    for number, (prompt, caller) in enumerate(zip(prompts, callers, strict=True)):
        ring.driver.submit(request(f"r{number}", prompt), caller.mailbox)
        ring.lap()
    ring.run()
    for prompt, caller in zip(prompts, callers, strict=True):
        events = await caller.collect()
        assert ids(events) == expected(prompt, 8, num_stages)
        assert [event.index for event in events] == list(range(8))
        assert events[-1].finish == "length"
    assert ring.kv_rows == 0, "every stage frees every sequence"
    assert (ring.driver.num_running, ring.driver.num_waiting) == (0, 0)


@pytest.mark.parametrize("num_stages", [1, 3])
async def test_requests_that_outgrow_the_kv_pool_take_turns_and_get_the_same_text(num_stages: int) -> None:
    ring = Ring(num_stages, prefill_chunk=3, max_tokens=30)
    prompts = [list(range(start, start + 8)) for start in range(1, 6)]
    callers = [Caller() for _ in prompts]
    for number, (prompt, caller) in enumerate(zip(prompts, callers, strict=True)):
        ring.driver.submit(request(f"r{number}", prompt, tokens=20), caller.mailbox)
    most = 0
    while ring.sent:
        ring.lap()
        most = max(most, *(sum(map(len, engine.kv.values())) for engine in ring.engines))
    for prompt, caller in zip(prompts, callers, strict=True):
        events = await caller.collect()
        assert ids(events) == expected(prompt, 20, num_stages)
        assert [event.index for event in events] == list(range(20))
    assert 20 < most <= 30 + len(prompts), "no more than the pool, and a step of each on its way"
    assert ring.kv_rows == 0


def test_an_engine_learns_that_a_sequence_is_only_kept() -> None:
    class Keeping(TinyEngine):
        kept: tuple[int, ...] = ()

        def keep(self, sequence: int) -> None:
            self.kept += (sequence,)

    engine = Keeping(True, True)
    Stage(engine, 0).process(Frame(BALLOT, 1, ops=(Insert(7, 9), Keep(7))))
    assert engine.kept == (7,) and engine.sequences() == [7]
    Stage(TinyEngine(True, True), 0).process(Frame(BALLOT, 1, ops=(Insert(7, 9), Keep(7))))


def test_those_in_the_queue_hear_their_places_as_they_move_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.rings.runner.queue_places.SIGN_OF_LIFE_S", 0.0)
    ring, told = Ring(2, max_running=1), [Answers() for _ in range(4)]
    for number, answers in enumerate(told):
        ring.driver.submit(request(f"r{number}", [1 + number], tokens=3, priority=number == 3), answers)
    ring.run()
    assert [answers.tokens for answers in told] == [expected([1 + number], 3, 2) for number in range(4)]
    places = [[message.queued for message in answers.messages if message.HasField("queued")] for answers in told]
    assert [list(dict.fromkeys(heard)) for heard in places] == [[], [1, 2, 0], [2, 3, 1, 0], [1, 0]]


def test_those_in_the_queue_hear_how_long_it_is_and_about_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.rings.runner.queue_places.SIGN_OF_LIFE_S", 0.0)
    ring, told = Ring(2, max_running=1, max_waiting=3), [Answers() for _ in range(5)]
    for number, answers in enumerate(told):
        ring.driver.submit(request(f"r{number}", [1 + number], tokens=3), answers)
    ring.run()
    heard = [message for message in told[3].messages if message.queued]
    assert [(one.queued, one.queue_length) for one in heard][:2] == [(3, 3), (3, 3)]
    assert (heard[-1].queued, heard[-1].queue_length) == (1, 1)
    assert any(one.wait_s > 0 for one in heard), "0 when a turn takes longer than the one before it"
    assert not heard[0].wait_s, "nobody has had a turn before"
    assert told[4].error == "overloaded" and told[4].messages[-1].wait_s >= 1


async def test_who_does_not_read_is_parked_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.rings.runner.outputs.PARK_AT", 4)
    ring, slow, fast = Ring(2), Caller(), Caller()
    ring.driver.submit(request("slow", [1], tokens=40), slow.mailbox)
    ring.driver.submit(request("fast", [2], tokens=40), fast.mailbox)
    fast_ids = []
    while ring.sent:
        ring.lap()
        while fast.mailbox.backlog:
            fast_ids += ids(list(events_message(await fast.mailbox.next()).events))
    assert fast_ids == expected([2], 40, 2)
    assert slow.mailbox.parked and slow.mailbox.backlog <= 6, "what it has not read stays small"
    assert ring.kv_rows == 2, "and what it has in KV stays"
    slow_ids = []
    for _ in range(40):
        while slow.mailbox.backlog:
            slow_ids += ids(list(events_message(await slow.mailbox.next()).events))
        ring.driver.unpark("slow", slow.mailbox)
        ring.run()
    assert slow_ids == expected([1], 40, 2)
    assert ring.kv_rows == 0


async def test_readers_that_stand_still_hold_up_nobody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.rings.runner.outputs.PARK_AT", 4)
    ring, slow, fast = Ring(2, max_running=2), [Caller(), Caller()], Caller()
    for number, caller in enumerate(slow):
        ring.driver.submit(request(f"slow {number}", [1 + number], tokens=40), caller.mailbox)
    ring.run()
    assert all(caller.mailbox.parked for caller in slow), "and nothing is on its way any more"
    ring.driver.submit(request("fast", [3], tokens=3), fast.mailbox)
    ring.run()
    assert ids(await fast.collect()) == expected([3], 3, 2)
    heard: list[list[int]] = [[], []]
    for _ in range(80):
        for number, caller in enumerate(slow):
            while caller.mailbox.backlog:
                heard[number] += ids(list(events_message(await caller.mailbox.next()).events))
            ring.driver.unpark(f"slow {number}", caller.mailbox)
            ring.run()
    assert heard == [expected([1], 40, 2), expected([2], 40, 2)]
    assert ring.kv_rows == 0


async def test_a_stop_id_ends_the_request_and_is_not_emitted() -> None:
    ring, caller = Ring(2), Caller()
    stop = expected([3, 4], 8, 2)[4]
    ring.driver.submit(request("r", [3, 4], stop_ids=frozenset({stop})), caller.mailbox)
    ring.run()
    events = await caller.collect()
    assert ids(events) == expected([3, 4], 4, 2)
    assert events[-1].finish == "stop" and not events[-1].HasField("token_id")


async def test_resumed_tokens_are_context_and_are_not_sent_again() -> None:
    ring, caller = Ring(2), Caller()
    whole = expected([3, 4], 8, 2)
    ring.driver.submit(request("r", [3, 4], resume_ids=tuple(whole[:5])), caller.mailbox)
    ring.run()
    events = await caller.collect()
    assert ids(events) == whole[5:]
    assert [event.index for event in events] == [5, 6, 7]


async def test_a_fault_poisons_its_sequence_only() -> None:
    ring, bad, good = Ring(3), Caller(), Caller()
    ring.driver.submit(request("bad", [1, 2]), bad.mailbox)
    ring.driver.submit(request("good", [5, 6]), good.mailbox)
    ring.engines[1].refuse.add(1)
    ring.run()
    await bad.collect()
    assert bad.error == "bad_row", "the fault's code reaches the caller"
    assert ids(await good.collect()) == expected([5, 6], 8, 3)
    assert ring.kv_rows == 0


async def test_an_operation_of_a_newer_version_ends_its_request_only() -> None:
    """A driver of a newer version, in a ring with stages of today."""
    ring, bad, good = Ring(3), Caller(), Caller()
    ring.driver.submit(request("bad", [1, 2]), bad.mailbox)
    ring.driver.submit(request("good", [5, 6]), good.mailbox)
    [begin] = [op for op in ring.sent[0].ops if isinstance(op, Insert) and op.sequence == 1]
    newer = UnknownOp("InsertWithPrefix", 1, (begin.max_tokens, [7]))
    ring.sent[0] = ring.sent[0].changed(ops=tuple(newer if op is begin else op for op in ring.sent[0].ops))
    ring.run()
    await bad.collect()
    assert bad.error == "peer_version" and "InsertWithPrefix" in bad.messages[-1].error_message
    assert ids(await good.collect()) == expected([5, 6], 8, 3)
    assert ring.kv_rows == 0
    after = Caller()
    ring.driver.submit(request("after", [5]), after.mailbox)
    ring.run()
    assert ids(await after.collect()) == expected([5], 8, 3), "no stage holds it against a later sequence"


async def test_an_engine_that_raises_ends_the_rows_of_that_frame_and_the_next_request_works() -> None:
    ring, caller, after = Ring(2), Caller(), Caller()
    ring.driver.submit(request("r", [1, 2]), caller.mailbox)
    ring.engines[1].crash = True
    ring.lap()
    ring.engines[1].crash = False
    ring.run()
    await caller.collect()
    assert caller.error == "engine_error" and "device fell over" in caller.messages[-1].error_message
    ring.driver.submit(request("after", [5]), after.mailbox)
    ring.run()
    assert ids(await after.collect()) == expected([5], 8, 2)
    assert ring.kv_rows == 0


async def test_cancelling_frees_every_stage_within_a_lap() -> None:
    ring, caller = Ring(4, prefill_chunk=2), Caller()
    ring.driver.submit(request("r", range(1, 12), tokens=10_000), caller.mailbox)
    ring.lap()
    assert ring.kv_rows > 0
    ring.driver.cancel("r", caller.mailbox)
    ring.driver.cancel("r", caller.mailbox)
    ring.run()
    await caller.collect()
    assert caller.error == "cancelled"
    assert ring.kv_rows == 0 and not ring.sent


async def test_a_second_request_of_the_same_id_is_refused_and_its_end_leaves_the_first_alone() -> None:
    ring, first, second = Ring(2), Caller(), Caller()
    ring.driver.submit(request("r", [1, 2]), first.mailbox)
    ring.driver.submit(request("r", [3]), second.mailbox)
    ring.driver.cancel("r", second.mailbox)
    ring.run()
    await second.collect()
    assert second.error == "invalid_request"
    assert ids(await first.collect()) == expected([1, 2], 8, 2)


async def test_a_full_queue_refuses_with_a_typed_error() -> None:
    ring = Ring(1, max_running=1, max_waiting=1)
    callers = [Caller() for _ in range(3)]
    for number, caller in enumerate(callers):
        ring.driver.submit(request(f"r{number}", [1]), caller.mailbox)
    ring.driver.callers.deliver()
    await callers[2].collect()
    assert callers[2].error == "overloaded"
    ring.run()
    for caller in callers[:2]:
        assert ids(await caller.collect()) == expected([1], 8, 1)


async def test_a_traced_request_ends_with_its_laps_and_others_do_not() -> None:
    ring, traced, plain = Ring(2, prefill_chunk=4), Caller(), Caller()
    ring.driver.submit(request("traced", range(1, 11), trace_id="ab" * 16), traced.mailbox)
    ring.driver.submit(request("plain", [1]), plain.mailbox)
    ring.run()
    events = await traced.collect()
    await plain.collect()
    laps = [lap for message in traced.messages for lap in message.trace]
    assert [lap.is_prefill for lap in laps] == [True] * 3 + [False] * 7
    assert [lap.tokens for lap in laps[:3]] == [4, 4, 2] and len(events) == 8
    assert all(lap.lap_s > 0 and lap.sent_s >= 0 for lap in laps)
    assert [lap.step for lap in laps] == sorted({lap.step for lap in laps})
    assert not any(message.trace for message in plain.messages)


@pytest.mark.parametrize("num_stages", [1, 3])
async def test_the_last_token_of_a_prompt_takes_no_lap_of_its_own(num_stages: int) -> None:
    ring, caller = Ring(num_stages), Caller()
    ring.driver.submit(request("r", range(1, 11), 1), caller.mailbox)
    assert [(row.n, row.num_logits) for row in ring.sent[0].rows] == [(10, 1)]
    ring.lap()
    assert ids(await caller.collect()) == expected(range(1, 11), 1, num_stages)


async def test_no_chunk_leaves_a_token_of_a_prompt_alone() -> None:
    ring, caller, rows = Ring(1, prefill_chunk=9), Caller(), []
    ring.driver.submit(request("r", range(1, 11), 1), caller.mailbox)
    while ring.sent:
        rows += [(row.n, row.num_logits) for row in ring.sent[0].rows]
        ring.lap()
    assert rows == [(8, 0), (2, 1)]
    assert ids(await caller.collect()) == expected(range(1, 11), 1, 1)


async def test_a_scored_prompt_that_lost_its_place_is_drawn_from_after_one_chunk() -> None:
    ring, scored, others = Ring(1, prefill_chunk=40, max_tokens=40), Caller(), {4: Caller(), 1: Caller(), 3: Caller()}
    prompt = [index % 7 for index in range(30)]
    for tokens, caller in others.items():
        ring.driver.submit(
            request(f"r{tokens}", [3, 5, 4], tokens, share_id=f"{tokens}" * (tokens == 4)), caller.mailbox
        )
    ring.driver.submit(request("scored", prompt, 1, prompt_logprobs=2), scored.mailbox)
    ring.run()
    assert ring.driver.evictions
    assert ids(await scored.collect()) == expected(prompt, 1, 1)
    for tokens, caller in others.items():
        assert ids(await caller.collect()) == expected([3, 5, 4], tokens, 1)


async def test_choices_of_a_request_draw_from_a_row_of_their_own_each() -> None:
    ring, callers = Ring(2), [Caller(), Caller()]
    for number, caller in enumerate(callers):
        ring.driver.submit(request(f"r{number}", range(1, 11), 1, share_id="s"), caller.mailbox)
    assert [(row.n, row.num_logits) for row in ring.sent[0].rows] == [(9, 0)]
    ring.run()
    assert [ids(await caller.collect()) for caller in callers] == [expected(range(1, 11), 1, 2)] * 2


async def test_prefill_progress_is_told() -> None:
    ring, caller = Ring(2, prefill_chunk=4), Caller()
    ring.driver.submit(request("r", range(1, 11)), caller.mailbox)
    ring.run()
    await caller.collect()
    assert max(message.prefilled for message in caller.messages) == 10
