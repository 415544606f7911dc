"""Runs the stages of this machine for the plans of any peer: reserve, commit, link, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.download import FetchStep
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.stage import ReserveAnswer, StageFailed, StageFetching, StageStatus, StageUpdate
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import FetchError, InputError, MeshError, ReservationError, StageLostError
from exo_mesh.machine.pressure import Needs
from exo_mesh.rings.hosting.collectives import own_endpoint, wiring_fault
from exo_mesh.rings.hosting.hops import SHOW_S, Hops, is_up
from exo_mesh.rings.hosting.local_models import LocalModels, refuse_misfit
from exo_mesh.rings.hosting.reservations import Lease, StageUse
from exo_mesh.rings.hosting.runner_exit import End
from exo_mesh.rings.hosting.runner_starter import RunnerStarter
from exo_mesh.rings.hosting.spares import HeadStart
from exo_mesh.rings.hosting.speed import SpeedMeter
from exo_mesh.rings.hosting.stage_memory import StageMemory
from exo_mesh.rings.hosting.stage_meter import StageMeter
from exo_mesh.rings.hosting.stage_state import beat_of, goes_on, is_well, seat_of, why_unwell
from exo_mesh.rings.hosting.status_board import StageBeat
from exo_mesh.rings.hosting.supervisor import Runner
from exo_mesh.rings.hosting.surroundings import StageSurroundings
from exo_mesh.security.credentials import CredentialSource

EXPIRE_EVERY_S = 1.0

IN_USE_S = 5.0
"""A stage that computed a frame within this time is in use."""

STOOD_STILL_S = 2.0
"""If the periodic check runs this late, this process was suspended or the machine slept."""

_log = logging.getLogger(__name__)


class StageHost:
    """The stages of this node, at most one per instance: a peer has one position in a ring.

    `can_run(engine, architecture)` returns, without importing anything heavy, why it cannot, or "". name: of this node,
    for errors.
    """

    def __init__(
        self,
        name: str,
        around: StageSurroundings,
        models: LocalModels,
        can_run: Callable[[str, str], str],
        memory: StageMemory,
        starter: RunnerStarter,
        metrics: Metrics,
        clock: Clock = monotonic,
        credentials: CredentialSource | None = None,
    ) -> None:
        self._name = name
        self._own_id = around.own_id
        self._around = around
        self._models = models
        self._can_run = can_run
        self._metrics = metrics
        self._clock = clock
        self._credentials = credentials
        self.memory = memory
        self._reservations = memory.held
        self._hops = Hops(around)
        self._runners: dict[str, Runner] = {}
        self._started: dict[str, Lease] = {}
        self._starter = starter
        self._guard = starter.history.guard
        self._speed = SpeedMeter()
        self._turn = asyncio.Lock()
        self.draining = False
        self._stopping = False
        self._tasks = TaskOwner()

    def start(self) -> None:
        self._tasks.keep(self._keep_expiring, "expire leases")
        self._tasks.keep(self._hops.keep, "ways of the hops")
        self._tasks.keep(self._starter.spares.keep, "spare runners")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that a bug has ended; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        """Take no more stages, and end all runners, each within 4 s, side by side."""
        self._stopping = True
        await asyncio.gather(*(runner.stop() for runner in self._runners.values()))
        await self._tasks.close()

    @property
    def leases(self) -> list[Lease]:
        return self._reservations.leases

    def usable_bytes(self) -> int:
        """Bytes that a new reservation could get now; 0 while this node drains, and where it holds no layers."""
        return 0 if self.draining else self.memory.usable_bytes()

    def stages(self) -> dict[tuple[str, Ballot], StageUse]:
        """The stages that run here, by (instance id, ballot in force)."""
        started, lately = self._started, self._clock() - IN_USE_S
        return {
            (instance_id, lease.ballot): StageUse(runner.board.watchers > 0, lease.worked_at > lately)
            for instance_id, runner in self._runners.items()
            for lease in (started[instance_id],)
        }

    def is_in_use(self) -> bool:
        """Whether a stage here has worked for a request within the last IN_USE_S seconds."""
        lately = self._clock() - IN_USE_S
        return any(lease.worked_at > lately for lease in self._started.values())

    @property
    def s_per_gb(self) -> dict[str, float]:
        """The measured speed of the engines here; see SpeedMeter."""
        return self._speed.s_per_gb()

    def promised(self, instance_id: str) -> Ballot:
        """The highest ballot of an instance that this node has promised."""
        return self._reservations.promised(instance_id)

    def beat(self, instance_id: str) -> Heartbeat | None:
        """The last heartbeat of the stage of an instance, if it runs here."""
        runner = self._runners.get(instance_id)
        return runner.beat if runner is not None else None

    def needs(self) -> Needs:
        """The available memory that the stages here will still take."""
        loading = [lease for lease in self.leases if not lease.ready]
        weights = sum(min(lease.pending_bytes, lease.weights_bytes) for lease in loading)
        return Needs(weights, self._reservations.pending_bytes, len(self._runners))

    async def press(self, level: int, free_bytes: int) -> None:
        """Send every stage here the memory pressure of the machine (0: there is room, 1: no new requests, 2: fewer
        requests) and the bytes that its KV may still take: its share of free_bytes, in proportion to what it may still
        need."""
        pending = self._reservations.pending_bytes
        sends = []
        for instance_id, runner in list(self._runners.items()):
            own = self._started[instance_id].pending_bytes
            sends.append(runner.press(level, free_bytes * own // pending if pending else free_bytes))
        await asyncio.gather(*sends)

    @property
    def runners(self) -> Mapping[str, Runner]:
        """The runners here, by instance."""
        return dict(self._runners)

    def beats(self) -> list[StageBeat]:
        """The last heartbeat of every stage that runs here."""
        return [beat_of(self._started[name], runner, self._own_id) for name, runner in self._runners.items()]

    async def reserve(self, plan: Plan, index: int) -> ReserveAnswer:
        """Hold memory for a stage, or for this node's rank of it. The stage of a replaced plan is ended first, so that
        its memory can be used again, unless its process can continue under the new plan. Each time a rank is reserved,
        its collectives get another port.

        Raises ReservationError if this stage can never run here: wrong peer, model, digest, engine or network.
        """
        if why := self.memory.why_no_layers:  # an owner of an older version does not know the role
            raise ReservationError(f"{self._name} holds no layers: {why}", peer_id=self._own_id)
        await refuse_misfit(plan, index, self._own_id, self._models, self._can_run)
        self._guard.check(plan, index)
        collective = await own_endpoint(plan, index, self._own_id, self._around.hosts_of)
        async with self._turn:
            if self._stopping:
                return ReserveAnswer(False, 0, "this node is stopping")
            if (fence := self._around.fence_of(plan.instance_id)) != NO_BALLOT:
                self._reservations.promise(plan.instance_id, fence)
            before = self._reservations.held(plan.instance_id)
            answer = self._reservations.reserve(plan, index, self._usable_for(plan, index), self._clock())
            if before is not None and self._reservations.held(plan.instance_id) is not before:
                kept = self._to_go_on(plan, index)
                if kept is None:
                    await self._end_runner(plan.instance_id)
                elif (lease := self._reservations.lease(plan.instance_id, plan.ballot)) is not None:
                    lease.taken_bytes = kept.taken_bytes
        if not answer.granted:
            _log.info("refused to reserve %s for ballot %s: %s", plan.stages[index].shard, plan.ballot, answer.reason)
        return replace(answer, collective=collective)

    def _usable_for(self, plan: Plan, index: int) -> int:
        """Bytes that a new reservation of this stage could get: less after a stage of the same model ran out of
        memory."""
        most = self._guard.most_bytes(plan, index)
        return self.usable_bytes() if most is None else min(most, self.usable_bytes())

    async def adopt(self, instance_id: str, ballot: Ballot, adopted: Ballot) -> ReserveAnswer:
        """Promise a running stage to a new owner; see Reservations.adopt."""
        async with self._turn:
            answer = self._reservations.adopt(instance_id, ballot, adopted)
        _log.info("adoption of %s by ballot %s: %s", instance_id, adopted, answer.reason or "granted")
        return answer

    async def commit(
        self, instance_id: str, ballot: Ballot, keep_kv_from: int | None = None, wiring: RankWiring | None = None
    ) -> AsyncGenerator[StageUpdate, None]:
        """Fetch the missing files of a stage and start it, or let its process continue from a lower ballot, or join
        those who watch it. Reports as long as the stage runs under this plan; the last report is `failed`.
        keep_kv_from: see ChangePlan; None: no stage.

        wiring: of this node's rank, if the stage is a tensor group and has not been started. Raises StageLostError if
        the plan is not in force here, InputError for a wiring of another rank.
        """
        head_start = self._starter.spares.head_start()
        try:
            async with aclosing(self._fetch(instance_id, ballot, head_start)) as steps:
                async for step in steps:
                    yield StageFetching(step.done, step.total)
            runner = await self._runner_by(instance_id, ballot, keep_kv_from, wiring, head_start)
        except FetchError as exc:
            self._reservations.release(instance_id, ballot)
            yield StageFailed(exc.code, str(exc), exc.remedy, exc.is_final)
            return
        finally:
            await head_start.close()
        async for update in runner.board.watch():
            yield update

    async def _runner_by(
        self,
        instance_id: str,
        ballot: Ballot,
        keep_kv_from: int | None,
        wiring: RankWiring | None,
        head_start: HeadStart,
    ) -> Runner:
        """The process that runs under this plan, started if there is none."""
        await head_start.ready()
        async with self._turn:
            if self._stopping:
                raise StageLostError("this node is stopping")
            lease = self._reservations.renew(instance_id, ballot, self._clock())
            if lease is None:
                promised = self._reservations.promised(instance_id)
                raise StageLostError(
                    f"ballot {ballot} of {instance_id} is not in force here; the promised ballot is {promised}"
                )
            runner = self._runners.get(instance_id)
            if runner is None or self._started[instance_id].plan.ballot != lease.plan.ballot:
                runner = await self._bring_in(lease, keep_kv_from, wiring, head_start)
            return runner

    async def _fetch(self, instance_id: str, ballot: Ballot, head_start: HeadStart) -> AsyncGenerator[FetchStep, None]:
        """Fetch the files of a stage that is to be started, and hold its lease meanwhile. Raises FetchError, and
        StageLostError if the plan is given up. head_start: begun as soon as there is something to wait for."""
        lease, started = self._reservations.lease(instance_id, ballot), self._started.get(instance_id)
        if lease is not None and lease.plan.takes_text:
            return  # its server has the files
        if lease is None or (started is not None and started.plan.ballot == lease.plan.ballot):
            return  # `commit` reports the error, or joins those who watch the stage
        if self._to_go_on(lease.plan, lease.index) is not None:
            return
        async with aclosing(self._models.fetch(lease.plan, lease.index)) as steps:
            async for step in steps:
                if self._stopping or self._reservations.renew(instance_id, ballot, self._clock()) is not lease:
                    raise StageLostError(f"ballot {ballot} of {instance_id} was given up while its files were fetched")
                if lease.stage.group is None:
                    # a rank's environment variables must be set before its engine's library is imported
                    head_start.begin(lease.stage.engine)
                yield step

    async def link(
        self, instance_id: str, ballot: Ballot, endpoint: str, next_peer: str, ranks: Sequence[str] = ()
    ) -> None:
        """Set where the next stage listens, at next_peer, and, for the leader of a tensor group, where the other ranks
        listen. Raises StageLostError if this plan does not run here."""
        runner = self._runners.get(instance_id)
        if runner is None or self._reservations.lease(instance_id, ballot) is None:
            raise StageLostError(f"ballot {ballot} of {instance_id} does not run here")
        if ranks:
            await runner.link_ranks(ranks)
        await self._hops.link(instance_id, runner, endpoint, next_peer)

    async def show_new_certificate(self) -> None:
        """Send this node's renewed credentials to the stages that run here."""
        assert self._credentials is not None, "an open mesh has none"
        sends = (runner.show(self._credentials.current) for runner in self._runners.values())
        for outcome in await asyncio.gather(*sends, return_exceptions=True):
            # a MeshError means that the runner is ending
            if isinstance(outcome, BaseException) and not isinstance(outcome, MeshError):
                raise outcome

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        """Check the stage of this plan: why it does not run here, or "" if it does, whichever peer has adopted it
        since."""
        runner, lease = self._runners.get(instance_id), self._started.get(instance_id)
        if runner is None or lease is None or lease.plan.ballot != ballot:
            return f"ballot {ballot} of {instance_id} does not run here"
        return await why_unwell(runner)

    async def status(self, instance_id: str, shows_hop: bool = False) -> StageStatus:
        """The state of an instance on this node, for any plan of it. shows_hop: open a hop that rests, and give it up
        to SHOW_S to connect."""
        shown_by = asyncio.get_running_loop().time() + SHOW_S if shows_hop else 0.0
        runner, lease = self._runners.get(instance_id), self._started.get(instance_id)
        usable_bytes = self.usable_bytes() + self._reservations.held_bytes(instance_id)
        promised = self._reservations.promised(instance_id)
        if runner is None or lease is None or await self.look(instance_id, lease.plan.ballot):
            return StageStatus(None, usable_bytes, promised=promised)
        shard = lease.stage.shard
        linked = await is_up(runner, shown_by)
        return StageStatus(range(shard.start, shard.stop), usable_bytes, linked, runner.rolls_back, promised)

    async def release(self, instance_id: str, ballot: Ballot, beaten_by: Ballot = NO_BALLOT) -> None:
        """End the stage of this plan or of a lower ballot, and free its memory. Returns when its process is gone.

        The process stays if it is reserved for a plan of a higher ballot: the owner that is beaten learns of that plan
        from one stage before the others have been committed. It ends with the reservation unless the plan comes.

        beaten_by: promise this ballot, too, so that the owner of the stage learns of it with its next request.
        """
        async with self._turn:
            self._reservations.release(instance_id, ballot)
            self._reservations.promise(instance_id, beaten_by)
            started, reserved = self._started.get(instance_id), self._reservations.held(instance_id)
            if started is None or started.ballot > ballot:
                return
            if reserved is None or self._to_go_on(reserved.plan, reserved.index) is None:
                await self._end_runner(instance_id)

    def _to_go_on(self, plan: Plan, index: int) -> Lease | None:
        """The lease of this instance's process, if the process is healthy and can continue under this plan."""
        runner, started = self._runners.get(plan.instance_id), self._started.get(plan.instance_id)
        if runner is None or started is None or not goes_on(started, plan, index):
            return None
        return started if is_well(runner) else None

    async def _bring_in(
        self, lease: Lease, keep_kv_from: int | None, wiring: RankWiring | None, head_start: HeadStart
    ) -> Runner:
        """A process for a lease: the running one if it can continue, else a new one."""
        plan, instance_id = lease.plan, lease.plan.instance_id
        started = self._to_go_on(plan, lease.index)
        if started is None and keep_kv_from is not None and lease.index >= keep_kv_from:
            raise StageLostError(f"{lease.stage.shard} should continue with its KV, but its runner is gone")
        if started is None:
            await self._end_runner(instance_id)  # the caller that started it may have disconnected before it was ready
            return await self._start_runner(lease, wiring, head_start)
        runner = self._runners[instance_id]
        lease.taken_bytes, lease.weights_bytes = started.taken_bytes, started.weights_bytes
        lease.step_bytes = started.step_bytes
        self._started[instance_id] = lease
        self._hops.forget(instance_id, runner)
        keeps = len(plan.stages) if keep_kv_from is None else keep_kv_from
        await runner.change(plan, lease.index, keeps)
        _log.info("%s continues under ballot %s", runner.label, lease.ballot)
        return runner

    async def _start_runner(self, lease: Lease, wiring: RankWiring | None, head_start: HeadStart) -> Runner:
        plan = lease.plan
        rank = lease.stage.peers.index(self._own_id)
        if fault := wiring_fault(lease.stage.group, rank, wiring):
            raise InputError(f"the wiring for {lease.stage.shard} does not fit the rank of this node: {fault}")
        started = await self._starter.start(lease, rank, wiring, head_start)
        runner = started.runner
        self._runners[plan.instance_id] = runner
        self._started[plan.instance_id] = lease
        self._metrics.runner_started(plan.model, plan.instance_id)
        meter = StageMeter(self._metrics.stages, started.facts, self._around.name_of)
        self._tasks.start(self._follow(runner, plan.instance_id, meter), f"runner of {runner.label}")
        return runner

    async def _follow(self, runner: Runner, instance_id: str, meter: StageMeter) -> None:
        before = Heartbeat()
        lease = self._started[instance_id]

        def on_beat(beat: Heartbeat) -> None:
            nonlocal before, lease
            if self._runners.get(instance_id) is runner:
                lease = self._started[instance_id]
            # a working stage keeps its lease, even if its owner cannot reach this node
            if beat.frames_in + beat.laps != before.frames_in + before.laps:
                self._reservations.renew(instance_id, lease.ballot, self._clock())
                lease.worked_at = self._clock()
            busy_s = beat.busy_s - before.busy_s
            if lease.plan.takes_text:
                self._metrics.rkllm.note_answers(lease.stage.engine, beat.prompts - before.prompts, busy_s)
            elif lease.ready:
                self._speed.take(lease.stage.engine, lease.step_bytes, busy_s, beat.progress - before.progress)
            if before.is_idle and not beat.is_idle:
                self._around.used()
            before = beat
            lease.taken_bytes = beat.memory_bytes
            if runner.board.ready and not lease.ready:
                _log.info("stage %s is ready: loaded in %.1f s", runner.label, runner.board.load_s)
                self._metrics.rkllm.note_load(lease.stage.engine, runner.board.load_s)
                self._starter.pace.started(runner.started_s)
                self._starter.pace.loaded(lease.stage.engine, lease.weights_bytes, runner.board.load_s)
            lease.ready = runner.board.ready
            meter.take(seat_of(lease, self._own_id), beat)

        def on_end(end: End, why: str) -> None:
            self._metrics.runner_ended(lease.plan.model, str(end))
            beat = runner.beat or Heartbeat()
            self._guard.ended(lease.plan, lease.index, end, why, beat.prefill_frames + beat.decode_frames)

        try:
            await runner.run(on_beat, on_end)
        finally:
            if self._runners.get(instance_id) is runner:
                lease = self._started[instance_id]
            self._gone(instance_id, runner)
            if self._reservations.lease(instance_id, lease.ballot) is lease:
                self._reservations.release(instance_id, lease.ballot)
            meter.end()
            failed = runner.board.failed
            _log.info("stage %s ended: %s", runner.label, failed.message if failed else "stopped")

    async def _end_runner(self, instance_id: str) -> None:
        runner = self._runners.get(instance_id)
        if runner is not None:
            await runner.stop()  # it counts as running until it is gone, even if this wait is cancelled
            self._gone(instance_id, runner)

    def _gone(self, instance_id: str, runner: Runner) -> None:
        if self._runners.get(instance_id) is runner:
            del self._runners[instance_id], self._started[instance_id]
            self._hops.forget(instance_id, runner)

    async def _keep_expiring(self) -> None:
        while True:
            due = self._clock() + EXPIRE_EVERY_S
            await next_wakeup(EXPIRE_EVERY_S)
            if self._clock() > due + STOOD_STILL_S:
                continue  # this node was suspended: no owner could watch a stage or renew its lease
            async with self._turn:
                await self._expire()

    async def _expire(self) -> None:
        """Free what no owner holds any more; a watched stage is held."""
        now = self._clock()
        for lease in self._reservations.leases:
            runner = self._runners.get(lease.plan.instance_id)
            if runner is not None and runner.board.watchers:
                self._reservations.renew(lease.plan.instance_id, lease.ballot, now)
        for lease in self._reservations.expire(now):
            _log.warning("the reservation of %s for ballot %s has expired", lease.stage.shard, lease.ballot)
            await self._end_runner(lease.plan.instance_id)
