"""A leader and the ranks that follow it, with the real hops between them and an engine that only writes down its calls.

No collective library is needed for what must hold before one is used: every rank gets the same calls in the same order,
and nobody computes a frame before all have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from exo_mesh.base.versions import SPOKEN
from exo_mesh.domain.frame import Frame
from exo_mesh.domain.plan import Plan, PlanInputs, StagePlan
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup
from exo_mesh.engine.contract import ANY_POSITION, Capabilities, LoadProgress, LoadRequest, StageInput, StageOutput
from exo_mesh.rings.runner.calls import events_message
from exo_mesh.rings.runner.driver import Driver
from exo_mesh.rings.runner.group.ranks import RankLinks
from exo_mesh.rings.runner.inbox import Cancel, Submit
from exo_mesh.rings.runner.scheduling.kv_budget import KvBudget
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.rings.runner.stage_setup import StageSetup
from exo_mesh.rings.runner.worker import Worker
from exo_mesh.wire.ring_receiver import RingReceiver
from tests.rings.runner.test_stage_and_driver import Caller, ids
from tests.wire.test_ring_hop import BALLOT, Receiving, hello

SIZE = 3
VOCAB = 100_000
CONTEXT = 100_000
Call = tuple[str, object]


class NotingEngine:
    """The next token is the last one plus 1. `calls`: what was asked of it, in order; `log`: the same for all ranks."""

    capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=("float32",))

    def __init__(self, rank: int, log: list[tuple[int, Call]]) -> None:
        self.rank, self.log = rank, log
        self.calls: list[Call] = []
        self.kv: dict[int, list[int]] = {}

    def note(self, name: str, what: object) -> None:
        self.calls.append((name, what))
        self.log.append((self.rank, self.calls[-1]))

    def load(self, request: LoadRequest, progress: LoadProgress) -> None: ...

    def insert(self, sequence: int, max_tokens: int) -> None:
        self.note("insert", (sequence, max_tokens))
        self.kv.setdefault(sequence, [])

    def forward(self, stage_input: StageInput) -> StageOutput:
        self.note("forward", (stage_input.rows, stage_input.token_ids))
        last, start = [], 0
        for row in stage_input.rows:
            own = list(stage_input.token_ids[start : start + row.n])
            self.kv[row.sequence][row.pos0 :] = own
            last += own[row.n - row.num_logits :]
            start += row.n
        logits = np.zeros((len(last), VOCAB), np.float32)
        logits[range(len(last)), [token + 1 for token in last]] = 1
        return StageOutput(logits=logits)

    def remove(self, sequence: int) -> None:
        self.note("remove", sequence)
        self.kv.pop(sequence, None)

    def sequences(self) -> Sequence[int]:
        return list(self.kv)

    def memory_bytes(self) -> int:
        return 0

    def close(self) -> None: ...


class Following(Receiving):
    """The end of a hop that hands what it hears to the worker of its rank."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self.receiver = RingReceiver(SPOKEN, "i", BALLOT, 0, self._deliver, lambda: worker.status)

    async def _deliver(self, frame: Frame) -> None:
        await self._worker.accept(frame)
        await super()._deliver(frame)


class Group:
    """All ranks of one stage, which is a whole ring."""

    def __init__(self) -> None:
        self.log: list[tuple[int, Call]] = []
        self.engines = [NotingEngine(rank, self.log) for rank in range(SIZE)]
        self.workers = [_worker(engine) for engine in self.engines]
        self.tasks: list[asyncio.Task[None]] = []

    def submit(self, name: str, prompt: Sequence[int], tokens: int) -> Caller:
        caller = Caller()
        sampling = SamplingParams(temperature=0)
        request = GenerateRequest(name, tuple(prompt), tokens, sampling, ignore_eos=True)
        self.workers[0].inbox.put_nowait(Submit(request, caller.mailbox))
        return caller

    async def settled(self) -> None:
        """All ranks hold nothing any more; fails if they do not get there."""
        async with asyncio.timeout(20):
            while any(engine.kv for engine in self.engines) or len({len(engine.calls) for engine in self.engines}) > 1:
                await asyncio.sleep(0.005)


def _worker(engine: NotingEngine) -> Worker:
    """As after a load."""
    group = TensorGroup("ring", tuple(f"p{rank}" for rank in range(SIZE)))
    stage = StagePlan("p0", "noting", Shard("m", 0, 1, 1), 0, group)
    plan = Plan("i", BALLOT, "m", "digest", (stage,), CONTEXT, PlanInputs((), "memory", 1), 4 * CONTEXT)
    wiring = RankWiring("ring", engine.rank, tuple(f"127.0.0.1:{rank + 1}" for rank in range(SIZE)))
    worker = Worker(StageSetup(plan, 0, Path(), {}, 8, wiring))
    worker.engine, worker._stage = engine, Stage(engine, 0, is_rank=True)
    worker._budget = KvBudget(engine, 0, plan.kv_tokens)
    if wiring.is_leader:
        worker.driver = Driver(BALLOT, worker._limits(), worker._outbox.append)
    return worker


@asynccontextmanager
async def group() -> AsyncIterator[Group]:
    made = Group()
    leader, *followers = made.workers
    ends = [Following(worker) for worker in followers]
    for end in ends:
        await end.up()
    links = RankLinks(hello(), SIZE, None)
    links.link_to([f"127.0.0.1:{end.port}" for end in ends])

    async def hand_out(frame: Frame) -> None:
        await links.hand_out(frame)
        for end in ends:
            await end.until(lambda end=end: frame.step in {got.step for got in end.frames})  # type: ignore[misc]
        made.log.append((0, ("all have", frame.step)))

    async def send(frame: Frame) -> None:
        raise AssertionError("the only stage of a ring sends to nobody, and a rank that follows never does")

    dialling = asyncio.create_task(links.run())
    made.tasks = [asyncio.create_task(leader.run(send, hand_out, lambda: links.status))]
    made.tasks += [asyncio.create_task(worker.run(send)) for worker in followers]
    try:
        yield made
    finally:
        for task in (dialling, *made.tasks):
            task.cancel()
        await asyncio.wait([dialling, *made.tasks])
        for end in ends:
            await end.down()


async def test_every_rank_is_asked_the_same_in_the_same_order_and_frees_it() -> None:
    async with group() as ranks:
        callers = [ranks.submit(f"r{number}", range(number, number + 5 + number), 6) for number in range(1, 4)]
        answers = [ids(await caller.collect()) for caller in callers]
        await ranks.settled()
    assert answers == [list(range(2 * number + 5, 2 * number + 11)) for number in range(1, 4)]
    leader, *followers = ranks.engines
    assert [name for name, _ in leader.calls].count("insert") == [name for name, _ in leader.calls].count("remove") == 3
    for follower in followers:
        assert follower.calls == leader.calls


async def test_the_leader_computes_a_frame_only_when_every_rank_has_it() -> None:
    """It would otherwise wait in a collective for ranks that wait for the frame."""
    async with group() as ranks:
        await ranks.submit("r", range(700), 4).collect()
        await ranks.settled()
    of_leader = [name for rank, (name, _) in ranks.log if rank == 0]
    computed = [place for place, name in enumerate(of_leader) if name == "forward"]
    assert len(computed) > 4
    since = 0
    for place in computed:
        assert "all have" in of_leader[since:place], of_leader
        since = place


async def test_a_prompt_of_any_length_reaches_every_rank_whole() -> None:
    prompt = [token % 1000 for token in range(70_000)]
    async with group() as ranks:
        assert ids(await ranks.submit("long", prompt, 2).collect()) == [prompt[-1] + 1, prompt[-1] + 2]
        await ranks.settled()
    for engine in ranks.engines:
        tokens = [token for name, what in engine.calls if name == "forward" for token in what[1]]  # type: ignore[index]
        assert tokens == [*prompt, prompt[-1] + 1]


async def test_the_driver_hears_how_the_memory_of_every_rank_is() -> None:
    async with group() as ranks:
        poor = ranks.workers[2]
        assert poor._budget is not None and ranks.workers[0].driver is not None
        scheduler = ranks.workers[0].driver._scheduler
        poor.press(1, None)
        poor._budget.tokens = 777
        await ranks.submit("r", [7], 30).collect()
        assert (scheduler.pressure, scheduler.max_tokens) == (1, 777)
        poor.press(0, None)
        await ranks.submit("s", [7], 30).collect()
        assert (scheduler.pressure, scheduler.max_tokens) == (0, 777)


async def test_a_cancelled_request_is_removed_from_every_rank_and_others_go_on() -> None:
    async with group() as ranks:
        stays, goes = ranks.submit("stays", [7], 60), ranks.submit("goes", [9], 50_000)
        async with asyncio.timeout(20):
            goes.messages.append(events_message(await goes.mailbox.next()))
        ranks.workers[0].inbox.put_nowait(Cancel("goes", goes.mailbox))
        assert ids(await stays.collect()) == list(range(8, 68))
        await ranks.settled()
    for engine in ranks.engines:
        assert engine.calls == ranks.engines[0].calls
        assert [name for name, _ in engine.calls].count("remove") == 2
