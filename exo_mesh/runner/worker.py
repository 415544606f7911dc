"""Runs frames, requests and cancels one after the other: the only user of the engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from exo_mesh.domain.frame import Frame, StageReport
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.engine.contract import GroupCheck, GroupMember, LoadProgress, LoadRequest, StageEngine
from exo_mesh.engine.registry import provider
from exo_mesh.errors import EngineError, RankLostError
from exo_mesh.runner.driver import Driver
from exo_mesh.runner.mailbox import Mailbox
from exo_mesh.runner.ranks import frame_deadline_s
from exo_mesh.runner.rendezvous import group_key, meet
from exo_mesh.runner.scheduler import PREFILL_CHUNK, Limits
from exo_mesh.runner.stage import Stage

STUCK_S = 120.0
"""Longest that an engine may take for one frame: 512 tokens of prefill on a slow board take some seconds. A device that
hangs never comes back, and only the end of the process frees it."""


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest
    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class Cancel:
    """Whoever waits at the mailbox is gone."""

    request_id: str
    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class Unpark:
    """Whoever waits at the mailbox has caught up."""

    request_id: str
    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class Ended:
    """A Shutdown op has come round."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A frame failed in the task that read it: an error of ours, for no engine error gets out of a stage."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Arrived:
    """A frame that has to wait for its turn, and since when."""

    frame: Frame
    since: float


Item = Arrived | Submit | Cancel | Unpark | Ended | Failed

DIRECT_TOKENS = 32
"""Frames of at most so many tokens are computed in the task that read them, which saves a turn of the loop. Reading
then waits for the hop to the next stage to take the frame; a frame this small always fits its flow-control window, so
that no circle of stages can wait for each other."""


@dataclass(frozen=True, slots=True)
class StageSetup:
    """What a worker needs to know of the plan it is a part of. rank: set in a tensor group."""

    plan: Plan
    index: int
    model_dir: Path
    options: dict[str, str]
    max_queued: int
    rank: RankWiring | None = None

    @property
    def num_stages(self) -> int:
        return len(self.plan.stages)

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def follows(self) -> bool:
        """A rank that a leader drives: it computes what it is handed, and passes nothing on."""
        return self.rank is not None and not self.rank.is_leader


Send = Callable[[Frame], Awaitable[None]]


class Worker:
    """Owns engine, stage and (at the last stage) driver.

    Computes on the event loop's own thread: a frame then costs one thread switch less than with a compute thread beside
    it, which is more than all of its Python. While a frame is computed the loop stands still; gRPC's own threads go on
    sending and receiving, and heartbeats come from another thread (`pulse`).

    `inbox` is bounded by what may be on its way: frames in flight, queued requests and one cancel for each.
    `progress` rises with each item done, and during a load. `pressure` is set by the node: see StageReport.
    """

    def __init__(self, setup: StageSetup) -> None:
        self._setup = setup
        self._outbox: deque[Frame] = deque()
        self._turn = asyncio.Lock()
        self._send: Send | None = None
        self._hand_out: Send | None = None
        self.inbox: asyncio.Queue[Item] = asyncio.Queue()
        self.progress = 0
        self.pressure = 0
        self.busy_s = self.load_s = 0.0
        self._computing_since = 0.0
        self.deadline_s = STUCK_S
        self.check: GroupCheck | None = None
        self.engine: StageEngine | None = None
        self.driver: Driver | None = None
        self._stage: Stage | None = None

    def load(self, progress: LoadProgress) -> None:
        """Make the engine and load the shard. Blocks. Raises MeshErrors.

        A rank of a tensor group meets the others first, and ends with the check of the group.
        """

        def counted(done: int, total: int) -> None:
            self.progress += 1
            progress(done, total)

        start = time.perf_counter()
        setup, plan = self._setup, self._setup.plan
        stage = plan.stages[setup.index]
        engine = provider(stage.engine).create()
        if setup.rank is not None:
            if not isinstance(engine, GroupMember):
                raise EngineError(f"the engine {stage.engine} cannot be a rank of a tensor group")
            meet(setup.rank, group_key(plan, setup.index))
        request = LoadRequest(
            stage.shard, setup.model_dir, plan.context_limit, setup.options, plan.activation_dtype, setup.rank
        )
        engine.load(request, counted)
        if isinstance(engine, GroupMember) and setup.rank is not None:
            self._verify(engine)
        if setup.is_last and not setup.follows:
            self.driver = Driver(plan.ballot, self._limits(), self._outbox.append)
        self.engine = engine
        self._stage = Stage(engine, setup.index, is_rank=setup.rank is not None)
        self.load_s = time.perf_counter() - start

    def _verify(self, engine: GroupMember) -> None:
        def moved(_done: int, _total: int) -> None:
            self.progress += 1
            self._computing_since = time.perf_counter()

        self._computing_since = time.perf_counter()
        self.check = engine.verify(PREFILL_CHUNK, moved)
        self._computing_since = 0.0
        self.deadline_s = frame_deadline_s(self.check, STUCK_S)

    def check_alive(self) -> None:
        """Raises EngineError if the engine has been computing one frame for longer than it may. From any thread."""
        since = self._computing_since
        if since and time.perf_counter() - since > self.deadline_s:
            if self._setup.rank is not None:
                raise RankLostError(
                    f"rank {self._setup.rank.rank} has not come back from one frame for {self.deadline_s:.0f} s: "
                    "another rank, or the way to it, hangs"
                )
            raise EngineError(f"the engine has not come back from one frame for {self.deadline_s:.0f} s")

    async def run(self, send: Send, hand_out: Send | None = None) -> None:
        """Work until a Shutdown op has come round, or until cancelled. `send` takes a frame to the next stage;
        `hand_out` gives the other ranks of a tensor group what this one is about to compute.

        Raises whatever goes wrong: the frame it went wrong with is missing from then on, and the ring cannot go on.
        """
        assert self.engine is not None, "load first"
        self._hand_out = hand_out
        self._send = send if self._setup.num_stages > 1 else self._to_self
        while not isinstance(item := await self.inbox.get(), Ended):
            async with self._turn:
                await self._do(item)

    async def accept(self, frame: Frame) -> None:
        """A frame has come: compute and pass it on now if it is small and its turn has come, else queue it."""
        if self._turn.locked() or self.inbox.qsize() or len(frame.token_ids) > DIRECT_TOKENS:
            self.inbox.put_nowait(Arrived(frame, time.perf_counter()))
        else:
            async with self._turn:
                try:
                    await self._frame(frame, time.perf_counter())
                    await self._pass_on()
                except Exception as exc:  # noqa: BLE001 - here it would end a stream, and `run` must end the process
                    self.inbox.put_nowait(Failed(exc))

    async def _do(self, item: Item) -> None:
        if isinstance(item, Arrived):
            await self._frame(item.frame, item.since)
        elif isinstance(item, Failed):
            raise item.error
        elif self.driver is not None:
            if isinstance(item, Submit):
                self.driver.submit(item.request, item.mailbox)
            elif isinstance(item, Cancel):
                self.driver.cancel(item.request_id, item.mailbox)
            elif isinstance(item, Unpark):
                self.driver.unpark(item.request_id, item.mailbox)
        await self._pass_on()

    async def _pass_on(self) -> None:
        """Send what the last item has made, and only then tell callers of it."""
        self.progress += 1
        while self._outbox:
            assert self._send is not None, "frames come only while the worker runs"
            await self._send(self._outbox.popleft())
        if self.driver is not None:
            self.driver.deliver_news()

    async def _to_self(self, frame: Frame) -> None:
        """The hop of a ring of one."""
        self.inbox.put_nowait(Arrived(frame, time.perf_counter()))
        await asyncio.sleep(0)  # nothing else would let other tasks run

    async def _frame(self, frame: Frame, since: float) -> None:
        assert self._stage is not None, "load first"
        if self._hand_out is not None:
            await self._hand_out(frame)
        start = self._computing_since = time.perf_counter()
        result = self._stage.process(frame)
        compute_s = time.perf_counter() - start
        self.busy_s += compute_s
        self._computing_since = 0.0
        report = StageReport(compute_s, start - since, self.pressure)
        frame = result.frame.changed(reports=(*result.frame.reports, report))
        if self.driver is not None:
            self.driver.returned(frame, result.logits)
        elif not self._setup.follows:
            self._outbox.append(frame)
        if result.shutdown:
            self.inbox.put_nowait(Ended())

    def _limits(self) -> Limits:
        limits = Limits(
            num_stages=self._setup.num_stages,
            max_waiting=self._setup.max_queued,
            max_tokens=self._setup.plan.kv_tokens,
        )
        most = self._setup.plan.pool_sequences
        return replace(limits, max_running=min(most, limits.max_running)) if most else limits
