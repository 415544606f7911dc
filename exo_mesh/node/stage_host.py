"""The stages that run on this machine, for whoever's plan: reserve, commit, link, release."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from exo_mesh.clock import Clock, monotonic
from exo_mesh.config import Settings
from exo_mesh.domain.fast_synch import runner_environment
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.sharding import sharded
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import InputError, MeshError, ReservationError, StageLostError
from exo_mesh.metrics import Metrics
from exo_mesh.node.hops import Hops
from exo_mesh.node.memory import MemoryReader, usable_bytes
from exo_mesh.node.reservations import Answer, Lease, Reservations
from exo_mesh.node.speed import SpeedMeter
from exo_mesh.node.stage_status import StageBeat
from exo_mesh.node.supervisor import RUNNER_COMMAND, Limits, Runner
from exo_mesh.node.tensor_groups import collective_endpoint, wiring_fault
from exo_mesh.proto import control_pb2, runner_pb2
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.tasks import TaskOwner
from exo_mesh.transport.plan_codec import plan_to_proto, rank_to_proto
from exo_mesh.transport.tls_codec import tls_to_proto

EXPIRE_EVERY_S = 1.0

SILENT_S = 2.0
"""A runner reports twice a second. One that has missed four reports is not killed for it (see Limits.silence_s), but
who asks whether it runs, because a connection to it broke, is told no."""

LISTEN_S = 0.6
"""... unless it reports within this: it may be this node that stood still, and has not read the reports yet."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalModels:
    """What a stage host asks of the models on disk; both may raise UnknownModelError or ModelError, and block."""

    card: Callable[[str], ModelCard]
    find: Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class HostLimits:
    """How runners are started and how long they may take."""

    runner: Limits = field(default_factory=Limits)
    command: Sequence[str] = RUNNER_COMMAND


class StageHost:
    """At most one stage per instance: a peer has one position in a ring.

    `can_run(engine, architecture)` says, without importing anything heavy, why it cannot, or "". host_of: see Hops.
    """

    def __init__(
        self,
        own_id: str,
        settings: Settings,
        models: LocalModels,
        can_run: Callable[[str, str], str],
        read_memory: MemoryReader,
        metrics: Metrics,
        *,
        limits: HostLimits = HostLimits(),
        clock: Clock = monotonic,
        credentials: CredentialSource | None = None,
        make_runner: Callable[..., Runner] = Runner,
        host_of: Callable[[str], str | None] = lambda peer_id: None,
    ) -> None:
        self._own_id = own_id
        self._settings = settings
        self._models = models
        self._can_run = can_run
        self._read_memory = read_memory
        self._metrics = metrics
        self._limits = limits
        self._clock = clock
        self._credentials = credentials
        self._reservations = Reservations()
        self._make_runner = make_runner
        self._host_of = host_of
        self._hops = Hops(host_of)
        self._runners: dict[str, Runner] = {}
        self._started: dict[str, Lease] = {}
        self._speed = SpeedMeter()
        self._turn = asyncio.Lock()
        self.draining = False
        self._stopping = False
        self._tasks = TaskOwner()

    def start(self) -> None:
        self._tasks.start(self._keep_expiring(), "expire leases")
        self._tasks.start(self._hops.keep(), "ways of the hops")

    async def stop(self) -> None:
        """Take no more stages, and end all runners, each within 4 s, side by side."""
        self._stopping = True
        await asyncio.gather(*(runner.stop() for runner in self._runners.values()))
        await self._tasks.close()

    @property
    def leases(self) -> list[Lease]:
        return self._reservations.leases

    @property
    def reserved_bytes(self) -> int:
        return self._reservations.reserved_bytes

    def usable_bytes(self) -> int:
        """What a new reservation could get now; nothing while this node drains."""
        if self.draining:
            return 0
        held = self._reservations
        return usable_bytes(
            self._read_memory(), self._settings.max_memory_bytes, held.reserved_bytes, held.pending_bytes
        )

    def stages(self) -> dict[tuple[str, Ballot], bool]:
        """(instance id, ballot in force) of the stages that run here, and whether somebody follows their reports."""
        return {
            (instance_id, self._started[instance_id].ballot): runner.board.watchers > 0
            for instance_id, runner in self._runners.items()
        }

    @property
    def s_per_gb(self) -> dict[str, float]:
        """How fast the engines here have shown themselves to be."""
        return self._speed.s_per_gb()

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens drawn so far, by instance whose driver runs here."""
        drivers = [lease.plan.instance_id for lease in self.leases if lease.plan.peer_ids[-1] == self._own_id]
        beats = {instance_id: self.beat(instance_id) for instance_id in drivers}
        return {instance_id: beat.tokens for instance_id, beat in beats.items() if beat is not None}

    def promised(self, instance_id: str) -> Ballot:
        """The highest ballot of an instance that this node has promised itself to."""
        return self._reservations.promised(instance_id)

    def beat(self, instance_id: str) -> runner_pb2.Heartbeat | None:
        """The last heartbeat of the stage of an instance, if it runs here."""
        runner = self._runners.get(instance_id)
        return runner.beat if runner is not None else None

    async def press(self, level: int) -> None:
        """Tell every stage here how short of memory the machine is: 0 there is room, 1 nobody new, 2 fewer."""
        await asyncio.gather(*(runner.press(level) for runner in list(self._runners.values())))

    def beats(self) -> list[StageBeat]:
        """The last heartbeat of every stage that runs here."""
        found = []
        for name, runner in self._runners.items():
            lease = self._started[name]
            beat = runner.beat or runner_pb2.Heartbeat()  # it has not had the time to send one
            drives = lease.stage.shard.is_last and lease.stage.peer_id == self._own_id
            found.append(StageBeat(name, lease.index, drives, beat))
        return found

    async def reserve(self, plan: Plan, index: int) -> Answer:
        """Hold memory for a stage, or for our rank of it. A beaten plan's stage is ended first, so that its memory can
        be given again. Each time a rank is asked, its collectives get another port.

        Raises ReservationError if this stage can never run here: wrong peer, model, digest, engine or network.
        """
        await self._check(plan, index)
        collective = await self._collective(plan, index)
        async with self._turn:
            if self._stopping:
                return Answer(False, 0, "this node is stopping")
            answer = self._reservations.reserve(plan, index, self.usable_bytes(), self._clock())
            if answer.superseded is not None:
                await self._end_runner(plan.instance_id)
        if not answer.granted:
            _log.info("refused %s of ballot %s: %s", plan.stages[index].shard, plan.ballot, answer.reason)
        return replace(answer, collective=collective)

    async def _collective(self, plan: Plan, index: int) -> str:
        stage = plan.stages[index]
        if stage.group is None:
            return ""
        rank = stage.peers.index(self._own_id)
        return await asyncio.to_thread(collective_endpoint, stage.group, rank, self._own_id, self._host_of)

    async def adopt(self, instance_id: str, ballot: Ballot, adopted: Ballot) -> Answer:
        """Promise a running stage to a new owner; see Reservations.adopt."""
        async with self._turn:
            answer = self._reservations.adopt(instance_id, ballot, adopted)
        _log.info("adoption of %s by ballot %s: %s", instance_id, adopted, answer.reason or "granted")
        return answer

    async def commit(
        self, instance_id: str, ballot: Ballot, wiring: RankWiring | None = None
    ) -> AsyncIterator[control_pb2.StageStatus]:
        """Start the stage, or join those who watch it; reports for as long as it lives, the last one is `failed`.

        wiring: of our rank, if the stage is a tensor group and has not been started. Raises StageLostError if the plan
        is not in force here, InputError for a wiring that is not of our rank.
        """
        async with self._turn:
            if self._stopping:
                raise StageLostError("this node is stopping")
            lease = self._reservations.renew(instance_id, ballot, self._clock())
            if lease is None:
                promised = self._reservations.promised(instance_id)
                raise StageLostError(f"ballot {ballot} of {instance_id} is not in force here; promised is {promised}")
            runner = self._runners.get(instance_id)
            if runner is None or self._started[instance_id].plan.ballot != lease.plan.ballot:
                await self._end_runner(instance_id)  # whoever began that may have hung up before it was done
                runner = await self._start_runner(lease, wiring)
        async for status in runner.board.watch():
            yield status

    async def link(
        self, instance_id: str, ballot: Ballot, endpoint: str, next_peer: str, ranks: Sequence[str] = ()
    ) -> None:
        """Tell the stage where the next one listens, at next_peer, and the leader of a tensor group where its other
        ranks do. Raises StageLostError if this plan runs not here."""
        runner = self._runners.get(instance_id)
        if runner is None or self._reservations.lease(instance_id, ballot) is None:
            raise StageLostError(f"ballot {ballot} of {instance_id} does not run here")
        if ranks:
            await runner.link_ranks(ranks)
        await self._hops.link(instance_id, runner, endpoint, next_peer)

    async def show_new_certificate(self) -> None:
        """Our credentials were renewed: give them to the stages that run here, too."""
        assert self._credentials is not None, "an open mesh has none"
        tls = tls_to_proto(self._credentials.current)
        assert tls is not None, "made from credentials"
        told = (runner.show(tls) for runner in self._runners.values())
        for outcome in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, MeshError):  # that one ends just now
                raise outcome

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        """Why the stage of the plan of this ballot does not run here; "" if it does, whoever has adopted it since."""
        runner, lease = self._runners.get(instance_id), self._started.get(instance_id)
        if runner is None or lease is None or lease.plan.ballot != ballot:
            return f"ballot {ballot} of {instance_id} does not run here"
        if (failed := runner.board.failed) is not None:
            return failed.message
        if not runner.board.ready:
            return f"{runner.label} is not loaded"
        if runner.silent_s > SILENT_S:
            await asyncio.sleep(LISTEN_S)
        return f"{runner.label} has been silent for {runner.silent_s:.0f} s" if runner.silent_s > SILENT_S else ""

    async def release(self, instance_id: str, ballot: Ballot) -> None:
        """End the stage of this plan or of a lower ballot, and free its memory. Returns when its process is gone."""
        async with self._turn:
            self._reservations.release(instance_id, ballot)
            started = self._started.get(instance_id)
            if started is not None and started.ballot <= ballot:
                await self._end_runner(instance_id)

    async def _check(self, plan: Plan, index: int) -> None:
        if not 0 <= index < len(plan.stages) or self._own_id not in plan.stages[index].peers:
            raise ReservationError(f"stage {index} of the plan is not of this peer", peer_id=self._own_id)
        try:
            card = await asyncio.to_thread(self._models.card, plan.model)
        except MeshError as exc:
            raise ReservationError(str(exc), peer_id=self._own_id) from exc
        if card.digest != plan.model_digest:
            raise ReservationError(
                f"the files of {plan.model} here have digest {card.digest[:12]}, the plan means "
                f"{plan.model_digest[:12]}: the peers hold different versions of the model",
                peer_id=self._own_id,
            )
        if problem := self._can_run(plan.stages[index].engine, card.architecture):
            raise ReservationError(problem, peer_id=self._own_id)

    async def _start_runner(self, lease: Lease, wiring: RankWiring | None) -> Runner:
        plan, settings = lease.plan, self._settings
        rank = lease.stage.peers.index(self._own_id)
        if fault := wiring_fault(lease.stage.group, rank, wiring):
            raise InputError(f"the wiring for {lease.stage.shard} is not that of its rank here: {fault}")
        first, last = settings.data_ports or (0, 0)
        start = runner_pb2.StartStage(
            plan=plan_to_proto(plan),
            stage=lease.index,
            model_dir=str(await asyncio.to_thread(self._models.find, plan.model)),
            options=settings.engine_options,
            host=settings.host,
            port_first=first,
            port_last=last,
            max_queued=settings.max_queued,
            tls=tls_to_proto(self._credentials.current if self._credentials else None),
            rank=None if wiring is None else rank_to_proto(wiring),
        )
        card = await asyncio.to_thread(self._models.card, plan.model)
        held = sharded(card, len(lease.stage.peers))
        lease.weights_bytes = held.shard_bytes(lease.stage.shard.start, lease.stage.shard.stop)
        label = f"{plan.instance_id}[{lease.stage.shard.start}:{lease.stage.shard.stop}]"
        label += f" rank {rank}" if wiring is not None else ""
        runner = self._make_runner(
            label,
            start,
            settings.host,
            limits=self._limits.runner,
            command=self._limits.command,
            environment=runner_environment(settings.fast_synch, os.environ),
        )
        self._runners[plan.instance_id] = runner
        self._started[plan.instance_id] = lease
        self._metrics.runner_started(plan.instance_id)
        self._tasks.start(self._follow(runner, lease), f"runner of {label}")
        return runner

    async def _follow(self, runner: Runner, lease: Lease) -> None:
        instance_id, index = lease.plan.instance_id, lease.index
        before = runner_pb2.Heartbeat()

        def on_beat(beat: runner_pb2.Heartbeat) -> None:
            if lease.ready:
                steps, busy_s = beat.progress - before.progress, beat.busy_s - before.busy_s
                self._speed.take(lease.stage.engine, lease.weights_bytes, busy_s, steps)
            before.CopyFrom(beat)
            lease.taken_bytes = beat.memory_bytes
            lease.ready = runner.board.ready
            self._metrics.stage_beat(instance_id, index, beat)

        try:
            await runner.run(on_beat)
        finally:
            self._gone(instance_id, runner)
            if self._reservations.lease(instance_id, lease.ballot) is lease:
                self._reservations.release(instance_id, lease.ballot)
            self._metrics.stage_gone(instance_id, index)
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
            await asyncio.sleep(EXPIRE_EVERY_S)
            async with self._turn:
                await self._expire()

    async def _expire(self) -> None:
        """Free what no owner holds any more; a stage that is watched is held."""
        now = self._clock()
        for lease in self._reservations.leases:
            runner = self._runners.get(lease.plan.instance_id)
            if runner is not None and runner.board.watchers:
                self._reservations.renew(lease.plan.instance_id, lease.ballot, now)
        for lease in self._reservations.expire(now):
            _log.warning("the reservation of %s for ballot %s has expired", lease.stage.shard, lease.ballot)
            await self._end_runner(lease.plan.instance_id)
