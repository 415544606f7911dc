"""Runs frames, requests and cancellations one after the other: the only user of the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn

from exo_mesh.domain.frame import Frame, MemoryStatus, ShowImage, StageReport
from exo_mesh.domain.runner.prefix_figures import PrefixFigures
from exo_mesh.engine.contract import GroupCheck, GroupMember, LoadProgress, LoadRequest, StageEngine, Warmable
from exo_mesh.engine.registry import provider
from exo_mesh.engine.warm_up import warm_up
from exo_mesh.errors import EngineError, RankLostError
from exo_mesh.rings.runner.disk_parts import disk_index, disk_store, ring_of
from exo_mesh.rings.runner.disk_store import DiskStore
from exo_mesh.rings.runner.drafting.sources import source_maker
from exo_mesh.rings.runner.driver import CALM_LAP_S, IDLE_LAP_S, Driver
from exo_mesh.rings.runner.engine_thread import EngineThread
from exo_mesh.rings.runner.frame_clock import FrameClock
from exo_mesh.rings.runner.grammars import Grammars
from exo_mesh.rings.runner.group.ranks import frame_deadline_s
from exo_mesh.rings.runner.group.rendezvous import group_key, meet
from exo_mesh.rings.runner.inbox import Arrived, Change, Computed, Done, Failed, Item, tell
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.ring_rest import RingRest
from exo_mesh.rings.runner.scheduling.kv_budget import KvBudget
from exo_mesh.rings.runner.scheduling.limits import PREFILL_CHUNK, SchedulerLimits
from exo_mesh.rings.runner.stage import Stage, StageResult
from exo_mesh.rings.runner.stage_setup import PreparedEngine, StageSetup
from exo_mesh.rings.runner.step_mode import SLOW_S, StepMode, StepModes

STUCK_S = 120.0
"""Longest time that a rank may compute one frame, whatever the check of its group measured."""

DIRECT_TOKENS = 32
"""Frames of at most this many tokens are computed in the task that read them, which saves a turn of the loop. Reading
then waits for the hop to the next stage to take the frame. A frame this small always fits the hop's flow-control
window, so no circle of stages can wait for each other."""

DISK_LOOK_S = 1.0
"""Time between two looks of a driver for something to write to disk."""

Send = Callable[[Frame], Awaitable[None]]


class Worker:
    """Owns engine, stage and (at the last stage) driver.

    StepModes decides where a frame is computed. INLINE, in the event loop's thread, a frame costs two thread switches
    less than with a compute thread, which is more than all of its Python; while a frame is computed the loop does
    nothing else, gRPC's own threads go on sending and receiving, and heartbeats come from another thread (NodeLink).
    QUEUED, the next frame is read before one is computed, and computed while that one is sent. APART (`engine_thread`)
    is for a driver whose steps are slow and follow each other, which samples and answers between them, and for frames
    that take long both to compute and to send. At the driver of a ring of one stage the engine's thread then takes the
    driver's turn too, with the lock `_turn_of_driver`, and wakes the loop only for updates that are due: a step costs
    no thread switch.

    `inbox` is bounded by what may be on its way: frames in flight, queued requests and one cancel for each. `progress`
    rises with each finished item, and during a load; `clock` times the frame that is being computed. From both the node
    sees whether the engine makes progress. on_use: see RingRest. on_shortage: called when this machine is short of
    memory while the ring is idle and something is kept here; in the thread that calls `press`.
    """

    def __init__(
        self,
        setup: StageSetup,
        engine_thread: EngineThread | None = None,
        prepared: PreparedEngine | None = None,
        on_use: Callable[[], None] = lambda: None,
        on_shortage: Callable[[], None] = lambda: None,
    ) -> None:
        self._setup, self._prepared = setup, prepared
        self._thread = engine_thread or EngineThread()
        self._arrived = self._handed_over = self._pressure = self.progress = 0
        self._modes = StepModes(is_last=setup.is_last, is_rank=setup.rank is not None)
        self._was_large = False
        self._sending: asyncio.Task[None] | None = None
        self._outbox: deque[Frame] = deque()
        self._turn = asyncio.Lock()
        self._turn_of_driver = threading.Lock()
        self._send: Send | None = None
        self._hand_out: Send | None = None
        self.inbox: asyncio.Queue[Item] = asyncio.Queue()
        self._free_bytes: int | None = None
        self._status_of_others: Callable[[], MemoryStatus] | None = None
        self.busy_s = self.load_s = self._computing_since = self._computed_at = self._looked_at = 0.0
        self._lap_wanted_at = 0.0
        self.clock = FrameClock()
        self.deadline_s = STUCK_S
        self.check: GroupCheck | None = None
        self.engine: StageEngine | None = None
        self.driver: Driver | None = None
        self._stage: Stage | None = None
        self._disk: DiskStore | None = None
        self._ballot = setup.plan.ballot
        self._budget: KvBudget | None = None
        self.rest = RingRest(self._is_busy, on_use)
        self._on_shortage = on_shortage

    def load(self, progress: LoadProgress) -> None:
        """Make the engine and load the shard. Blocks. Raises MeshErrors.

        A rank of a tensor group first meets the other ranks, and at the end checks the group.
        """

        def counted(done: int, total: int) -> None:
            self.progress += 1
            progress(done, total)

        start = time.perf_counter()
        setup, plan = self._setup, self._setup.plan
        stage = plan.stages[setup.index]
        prepared, self._prepared = self._prepared, None
        use = prepared is not None and prepared.name == stage.engine
        engine = prepared.engine if prepared is not None and use else provider(stage.engine).create()
        if setup.rank is not None:
            if not isinstance(engine, GroupMember):
                raise EngineError(f"the engine {stage.engine} does not support tensor groups")
            meet(setup.rank, group_key(plan, setup.index))
        grammars = Grammars(setup.model_dir, self._wake)
        if setup.is_last and not setup.follows:
            grammars.prepare()
        limit, dtype = plan.context_limit, plan.activation_dtype
        request = LoadRequest(stage.shard, setup.model_dir, limit, setup.options, dtype, setup.rank, setup.memory)
        engine.load(request, counted)
        if isinstance(engine, GroupMember) and setup.rank is not None:
            self._verify(engine)
        elif setup.warms_up and isinstance(engine, Warmable):
            warm_up(engine, plan.context_limit)
            self.progress += 1
        self._disk = disk_store(setup)
        if setup.is_last and not setup.follows:
            prefix = PrefixCache(len(plan.stages), plan.pool_sequences)
            disk, sources = disk_index(setup, self._disk), source_maker(setup.draft, engine)
            self.driver = Driver(plan.ballot, self._limits(), self._outbox.append, grammars, prefix, disk, sources)
        self.engine = engine
        self._stage = Stage(engine, setup.index, is_rank=setup.rank is not None, disk=self._disk)
        self._budget = KvBudget(engine, stage.reserve_bytes, plan.kv_tokens, setup.prefix_bytes)
        self.load_s = time.perf_counter() - start
        self.rest.used()  # the ring is new

    def _verify(self, engine: GroupMember) -> None:
        def moved(_done: int, _total: int) -> None:
            self.progress += 1
            self._computing_since = time.perf_counter()

        self._computing_since = time.perf_counter()
        self.check = engine.verify(PREFILL_CHUNK, moved)
        self._computing_since = 0.0
        self.deadline_s = frame_deadline_s(self.check, STUCK_S)

    @property
    def num_sequences(self) -> int:
        """Number of running sequences, without sequences that only the prefix cache keeps. From any thread."""
        if self.engine is None or self._budget is None:
            return 0
        return max(0, len(self.engine.sequences()) - self._budget.num_kept)

    def _is_busy(self) -> bool:
        """Whether a request waits or runs here. From any thread."""
        driver = self.driver
        is_driving = driver is not None and driver.num_waiting + driver.num_running > 0
        return is_driving or self.num_sequences > 0 or self.clock.tokens > 0

    def describe_prefix(self, figures: PrefixFigures) -> None:
        """Write what this stage keeps for the prefix cache into a heartbeat. From any thread."""
        if self._budget is not None:
            figures.kept, figures.num_bytes = self._budget.num_kept, self._budget.kept_bytes
        if self._disk is not None:
            self._disk.describe(figures)

    def look(self) -> None:
        """Let the driver find out whether a machine needs the memory of kept sequences, and renew their digest after a
        change. From any thread, often."""
        driver, now = self.driver, time.perf_counter()
        if driver is None or not driver.holds:
            return
        if now - self._looked_at >= (self.idle_lap_s if driver.disk is None else DISK_LOOK_S):
            self._looked_at = now
            self._wake(partial(driver.look, self.idle_lap_s))
        if driver is not None and driver.digests.is_due(now):
            self._wake(driver.make_digest)

    @property
    def idle_lap_s(self) -> float:
        """Time between two frames of this ring while stages keep sequences and no request runs. From any thread."""
        return CALM_LAP_S if self.rest.is_idle and not self._setup.has_group else IDLE_LAP_S

    def send_lap(self) -> None:
        """Let the driver find out soon whether a machine needs the memory of kept sequences; see `look`."""
        if self.driver is not None and self.driver.holds:
            self._wake(partial(self.driver.look, 0.0))

    def check_alive(self) -> None:
        """Raises RankLostError if a rank has been computing one frame for longer than its group may: it waits for
        another rank. From any thread. For other stages their node decides that; see `clock`."""
        since, rank = self._computing_since, self._setup.rank
        if rank is not None and since and time.perf_counter() - since > self.deadline_s:
            what = f"rank {rank.rank} has been computing one frame for {self.deadline_s:.0f} s"
            raise RankLostError(f"{what}: another rank, or the connection to it, hangs")

    async def run(
        self, send: Send, hand_out: Send | None = None, status_of_others: Callable[[], MemoryStatus] | None = None
    ) -> NoReturn:
        """Work until cancelled. `send` takes a frame to the next stage. In a tensor group its leader has `hand_out`,
        which sends the other ranks the frame to compute, and their status. Raises any error: the frame with the error
        is missing from then on, and the ring cannot continue."""
        assert self.engine is not None, "load first"
        self._hand_out = hand_out
        self._status_of_others = status_of_others
        self._send = send
        try:
            while True:
                item = await self.inbox.get()
                async with self._turn:
                    await self._do(item)
        finally:
            if self._sending is not None:
                await self._sending

    async def accept(self, frame: Frame) -> None:
        """Compute and forward a received frame at once if it is small and nothing is queued before it; otherwise queue
        it."""
        now = time.perf_counter()
        if frame.rows:
            self.rest.used()
        if frame.ballot != self._setup.plan.ballot:
            self._queue(frame, now)  # behind the change that waits for its turn
        elif self._thread.apart and not self._arrived:
            self._hand_over(frame, now)
        elif self._must_wait or len(frame.token_ids) > DIRECT_TOKENS:
            self._queue(frame, now)
        else:
            await self._turn.acquire()  # it is free, so this does not wait; `async with` would take twice as long
            try:
                if self._hand_out is not None:
                    await self._hand_out(frame)
                self._step(frame, now)
                await self._pass_on()
            except Exception as exc:  # noqa: BLE001 - here it would end a stream, and `run` must end the process
                self.inbox.put_nowait(Failed(exc))
            finally:
                self._turn.release()

    @property
    def _must_wait(self) -> bool:
        """Whether a frame must queue, because all do in this mode, or others are before it."""
        is_behind = self._handed_over > 0 or self._turn.locked() or not self.inbox.empty()
        return is_behind or self._modes.mode is not StepMode.INLINE

    def change(self, change: Change) -> None:
        """Continue under another plan, after the current frame. Frames that wait for their turn are dropped."""
        self._ballot = change.setup.plan.ballot
        self.inbox.put_nowait(change)

    async def close(self) -> None:
        """Free what the engine holds, after the frames that it was given."""
        if self._disk is not None:
            await asyncio.to_thread(self._disk.close)
        if self.engine is not None:
            await self._thread.call(self.engine.close)

    async def _do(self, item: Item) -> None:
        if isinstance(item, Arrived):
            with self._turn_of_driver:  # the engine's thread counts frames, too
                self._arrived -= 1
                if item.frame.ballot != self._ballot:
                    return
                if self._thread.apart:
                    self._hand_over(item.frame, item.since)
                    return
            if self._hand_out is not None:
                await self._hand_out(item.frame)
            self._step(item.frame, item.since)
        elif isinstance(item, Computed):
            self._handed_over -= 1
            if item.result.frame.ballot == self._ballot:
                self._computed(item.result)
        elif isinstance(item, Failed):
            raise item.error
        elif isinstance(item, Change):
            await self._change(item)
        elif self.driver is not None:
            with self._turn_of_driver:
                tell(self.driver, item)
        await self._pass_on()

    def _wake(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the turn of the driver. From any thread."""
        self._thread.tell_loop(self.inbox.put_nowait, Done(callback))

    async def _pass_on(self) -> None:
        """Send the frames that the last item has made, and only then deliver events to callers."""
        self.progress += 1
        if self._is_alone:
            with self._turn_of_driver:
                self._give_turns()
            if self._arrived:
                await asyncio.sleep(0)  # nothing else would let other tasks run
        elif self._modes.mode is StepMode.QUEUED:
            await self._begin_sending()
        else:
            if self._sending is not None:
                await self._end_sending()
            await self._send_all()
        self._deliver()

    def _deliver(self) -> None:
        with self._turn_of_driver:
            if self.driver is not None:
                self.driver.callers.deliver()

    async def _begin_sending(self) -> None:
        """Let the loop write, and read what has come, but wait for neither."""
        await self._end_sending()
        self._sending = asyncio.create_task(self._send_all())
        await asyncio.sleep(0)

    async def _end_sending(self) -> None:
        """One task at a time may send."""
        if self._sending is not None:
            sending, self._sending = self._sending, None
            await sending

    async def _send_all(self) -> None:
        start = time.perf_counter()
        while self._outbox:
            assert self._send is not None, "frames come only while the worker runs"
            await self._send(self._outbox.popleft())
        if self._was_large:
            self._modes.sent_chunk(time.perf_counter() - start)
            self._move_loop()

    @property
    def _is_alone(self) -> bool:
        """Whether this is the driver of a ring of one stage, whose frames go nowhere else."""
        return self._setup.num_stages == 1 and self.driver is not None

    def _give_turns(self) -> None:
        """The hop of a ring with one stage. In the loop's or the engine's thread, which has the turn of the driver."""
        now = time.perf_counter()
        while self._outbox:
            frame = self._outbox.popleft()
            if self._thread.apart and not self._arrived:
                self._hand_over(frame, now)
            else:
                self._queue(frame, now)

    def _queue(self, frame: Frame, since: float) -> None:
        """Queue a frame behind all frames that arrived before, from whichever thread."""
        tells = self._is_alone and (self._thread.apart or self._arrived)
        put = partial(self._thread.tell_loop, self.inbox.put_nowait) if tells else self.inbox.put_nowait
        self._arrived += 1
        put(Arrived(frame, since))

    def _step(self, frame: Frame, since: float) -> None:
        """Compute a frame in this thread, and measure how long it takes. The leader of a tensor group hands it to the
        other ranks before."""
        result = self._compute(frame, since)
        slow = result.frame.reports[-1].compute_s > SLOW_S
        self._was_large = slow and len(frame.token_ids) > DIRECT_TOKENS
        self._computed(result)

    def _move_loop(self) -> None:
        """Give the event loop the thread that the present mode wants. It rejoins the engine's thread once no frame is
        handed over or waits, so that frames keep their order."""
        if self._modes.mode is StepMode.APART:
            self._thread.part()
        elif self._thread.apart and not self._handed_over and not self._arrived:
            self._thread.tell_loop(self._thread.rejoin)

    def _hand_over(self, frame: Frame, since: float) -> None:
        """Let the engine's thread compute a frame; the result comes into the inbox."""
        self._handed_over += 1
        self._thread.submit(partial(self._compute_apart, frame, since))

    def press(self, level: int, free_bytes: int | None) -> None:
        """Set how short of memory the machine is, see StageReport, and how many bytes KV may still take here. From any
        thread."""
        self._pressure, self._free_bytes = level, free_bytes
        now = time.perf_counter()
        keeps = self._budget is not None and self._budget.num_kept
        if keeps and self.rest.is_idle and now - self._lap_wanted_at >= IDLE_LAP_S:
            self._lap_wanted_at = now
            self._on_shortage()

    @property
    def status(self) -> MemoryStatus:
        """The memory status of this process alone. From any thread."""
        budget = self._budget
        return MemoryStatus(self._pressure) if budget is None else MemoryStatus(self._pressure, budget.tokens)

    def _compute_apart(self, frame: Frame, since: float) -> None:
        item: Item
        try:
            item = Computed(self._compute(frame, since))
            if self._is_alone:
                self._go_on(item.result)
                return
        except Exception as exc:  # noqa: BLE001 - `run` must end the process
            item = Failed(exc)
        self._thread.tell_loop(self.inbox.put_nowait, item)

    def _go_on(self, result: StageResult) -> None:
        """Take the driver's turn after a frame, and begin the next one. In the engine's thread."""
        assert self.driver is not None, "a ring of one stage has its driver here"
        with self._turn_of_driver:
            self._handed_over -= 1
            self.progress += 1
            if result.frame.ballot == self._ballot:
                self._computed(result)
            self._give_turns()
            is_due = self.driver.callers.is_due(time.monotonic(), is_idle=not self._handed_over)
        if is_due:
            self._thread.tell_loop(self._deliver)

    def _compute(self, frame: Frame, since: float) -> StageResult:
        """Run a frame through the stage, and add the stage's report to it. In the engine's thread."""
        assert self._stage is not None and self._budget is not None, "load first"
        start = self._computing_since = time.perf_counter()
        pause_s = since - self._computed_at
        num_tokens = len(frame.token_ids) or sum(op.picture.num_tokens for op in frame.ops if isinstance(op, ShowImage))
        self.clock.begin(num_tokens, is_prefill=frame.is_prefill)
        result = self._stage.process(frame)
        compute_s = self.clock.end()
        self._computed_at = start + compute_s
        self._computing_since = 0.0
        self.busy_s += compute_s
        self._budget.computed(frame, self._free_bytes)
        report = self._report(self._budget, compute_s, start - since)
        passed = result.frame.carrying(result.frame.tensors, (*result.frame.reports, report))
        return StageResult(passed, result.logits, result.hidden, pause_s)

    def _report(self, budget: KvBudget, compute_s: float, waited_s: float) -> StageReport:
        """The report of this stage on a frame that it has computed."""
        pressure, tokens, slack_tokens = self._pressure, budget.tokens, budget.slack_tokens
        if self._status_of_others is not None:
            others = self._status_of_others()
            most = min(tokens + slack_tokens, others.kv_tokens)
            pressure, tokens = MemoryStatus(pressure, tokens).worse(others)
            slack_tokens = max(0, most - tokens)
        news = None if self._disk is None else self._disk.take_news()
        assert self.engine is not None, "it has been loaded"
        declared = self.engine.capabilities
        return StageReport(
            compute_s, waited_s, pressure, tokens, budget.most_kept_tokens, declared.cuts_anywhere, news,
            budget.shared.least, budget.shared_tokens, slack_tokens, declared.rollback, declared.cuts_at_rows,
        )  # fmt: skip

    def _computed(self, result: StageResult) -> None:
        if self.driver is not None:
            is_apart = self._thread.apart and not self._is_alone
            self.driver.returned(result.frame, result.logits, result.hidden, is_apart=is_apart)
        elif not self._setup.follows:
            self._outbox.append(result.frame)
        frame = result.frame
        if frame.rows and not frame.is_prefill:
            self._modes.decoded(frame.reports[-1].compute_s, result.pause_s)
            self._move_loop()

    async def _change(self, change: Change) -> None:
        with self._turn_of_driver:
            self._outbox.clear()
        await self._thread.call(partial(self._begin_anew, change))
        self._setup = change.setup  # no frame is handed over now, so the turn is free
        resumed = 0
        if self.driver is not None:
            self.driver.prefix.most_sequences = change.setup.plan.pool_sequences
            if self.driver.disk is not None:
                self.driver.disk.ring = ring_of(change.setup)
            resumed = self.driver.change(change.setup.plan.ballot, self._limits(), change.kept_from)
        change.done(resumed)

    def _begin_anew(self, change: Change) -> None:
        """Start under the new plan, after the frames of the old one. In the engine's thread."""
        assert self.engine is not None and self._budget is not None, "load first"
        is_rank = change.setup.rank is not None
        self._stage = Stage(self.engine, change.setup.index, is_rank=is_rank, disk=self._disk)
        plan = change.setup.plan
        self._budget.plan(plan.stages[change.setup.index].reserve_bytes, plan.kv_tokens)
        if change.setup.index < change.kept_from:
            self._stage.forget(list(self.engine.sequences()))
            self._budget.forget()

    def _limits(self) -> SchedulerLimits:
        setup, plan = self._setup, self._setup.plan
        most = plan.pool_sequences or setup.max_running
        return SchedulerLimits(
            num_stages=setup.num_stages,
            prefill_chunk=setup.prefill_chunk,
            max_running=min(most, setup.max_running),
            max_waiting=setup.max_queued,
            max_tokens=plan.kv_tokens,
        )
