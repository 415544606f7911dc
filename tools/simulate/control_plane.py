"""Whole control planes (placer, ring monitor, stage host, reservations, instances) with simulated runners, and a ledger
of everything that they start."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.stage import StageHopLost, StageListening, StageReady
from exo_mesh.domain.view import Record
from exo_mesh.engine.contract import ModelSurvey
from exo_mesh.errors import MeshError, StageLostError
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.memory import MemoryReading
from exo_mesh.mesh.membership.detector import LAN
from exo_mesh.rings.hosting import calls as hosting_calls
from exo_mesh.rings.hosting.local_models import LocalModels
from exo_mesh.rings.hosting.runner_exit import End
from exo_mesh.rings.hosting.runner_starter import USUAL_LIMITS, RunnerHistory, RunnerStarter
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.rings.hosting.stage_memory import StageMemory
from exo_mesh.rings.hosting.status_board import StatusBoard
from exo_mesh.rings.hosting.surroundings import StageSurroundings
from exo_mesh.rings.placing import calls as instance_calls
from exo_mesh.rings.placing.candidate_pool import CandidatePool, Here
from exo_mesh.rings.placing.group_facts import GroupKnowledge
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.placing.owned_rings import OwnedRings
from exo_mesh.rings.placing.placer import Placer
from exo_mesh.rings.placing.planner import Planner
from exo_mesh.rings.placing.recoverer import Recoverer
from exo_mesh.rings.placing.ring_use import RingUse
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.runner.endpoint import HOP_LOST_S
from exo_mesh.settings.config import Settings
from exo_mesh.settings.effective import EffectiveSettings
from exo_mesh.wire.peer_call import AnyAnswer
from exo_mesh.wire.ring_link import LOST_AFTER_S
from exo_mesh.wire.runner_commands import StartStage
from tools.simulate.mesh import SimPeer
from tools.simulate.network import Network
from tools.simulate.virtual_loop import VirtualLoop

MODEL = "organisation/some-model-0-8B-4bit"
NUM_LAYERS = 8
GB = 10**9
CARD = ModelCard(
    name=MODEL,
    architecture="sim",
    num_layers=NUM_LAYERS,
    hidden_size=64,
    vocab_size=100,
    context_length=4096,
    layer_bytes=(GB,) * NUM_LAYERS,
    embed_bytes=0,
    head_bytes=0,
    tied=False,
    kv_bytes_per_token=1,
    dtype="bf16",
    eos_ids=(0,),
    legal_cuts=tuple(range(NUM_LAYERS)),
    digest="d" * 64,
)


class Nothing:
    """Accepts any call and any attribute: stands in for metrics and a journal."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self


class AnyCut:
    """Surveys of engines that hold the model as in the files and cut it anywhere."""

    async def of(self, card: ModelCard, engine: str) -> ModelSurvey:
        return ModelSurvey(card.legal_cuts)


class OneModel:
    """A catalogue in which every peer has the model."""

    async def card(self, name: str) -> ModelCard:
        return CARD


@dataclass(slots=True)
class Ledger:
    """Every runner of the world. Violations are recorded with the time."""

    loop: VirtualLoop
    running: dict[tuple[str, str], SimRunner] = field(default_factory=dict)
    highest: dict[tuple[str, str], Ballot] = field(default_factory=dict)
    by_endpoint: dict[str, SimRunner] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    started: int = 0
    changed: int = 0
    rings_ready: set[tuple[str, Ballot]] = field(default_factory=set)

    def start(self, runner: SimRunner) -> None:
        self.started += 1
        plan, peer = runner.plan, runner.peer
        key = (peer.address, plan.instance_id)
        before = self.running.get(key)
        if before is not None and before.alive:
            self.violate(f"{plan.ballot} starts on {peer.address} while {before.plan.ballot} runs there")
        life = (peer.process.name, plan.instance_id)
        if plan.ballot <= self.highest.get(life, Ballot(0, "")):
            self.violate(f"{plan.ballot} starts on {peer.address} after {self.highest[life]}")
        self.highest[life] = plan.ballot
        self.running[key] = runner
        self.by_endpoint[runner.endpoint] = runner

    def change(self, runner: SimRunner) -> None:
        """The runner continues under a higher ballot."""
        self.changed += 1
        life = (runner.peer.process.name, runner.plan.instance_id)
        if runner.plan.ballot <= self.highest[life]:
            self.violate(f"{runner.label} goes on by {runner.plan.ballot} after {self.highest[life]}")
        self.highest[life] = runner.plan.ballot

    def listens(self, endpoint: str) -> bool:
        port = endpoint.rpartition(":")[2]
        return any(name.rpartition(":")[2] == port and one.alive for name, one in self.by_endpoint.items())

    def violate(self, text: str) -> None:
        self.violations.append(f"{self.loop.time():.2f} s: {text}")

    @property
    def alive(self) -> list[SimRunner]:
        return [runner for runner in self.running.values() if runner.alive]


class SimRunner:
    """A runner that loads for a while, reports a hop that has been broken for 5 s, and ends if no other plan arrives,
    like a real runner."""

    def __init__(self, node: SimNode, start: StartStage) -> None:
        self.peer = node
        self.plan: Plan = start.plan
        self.index = start.stage
        self.label = f"{self.plan.instance_id}[{self.index}]"
        self.board = StatusBoard()
        self.beat: Heartbeat | None = None
        self.alive = False
        self._ledger = node.ledger
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._next = ""
        self._broken_s = 0.0
        self.rolls_back = True
        self._rng = node.rng
        self.silent_s = self.started_s = 0.0
        self.endpoint = f"{node.address.partition(':')[0]}:{10_000 + self._ledger.started}"

    async def run(
        self,
        on_beat: Callable[[Heartbeat], None],
        on_end: Callable[[End, str], None] = lambda end, why: None,
    ) -> None:
        """Its end counts for no crash loop, because runners die far more often here than the breaker allows."""
        self.alive = True
        self._ledger.start(self)
        try:
            await self._run(on_beat)
        finally:
            self.board.fail(StageLostError.code, "ended")
            self.alive = False
            self._gone.set()

    async def _run(self, on_beat: Callable[[Heartbeat], None]) -> None:
        if await self._stopped_within(self._rng.uniform(0.1, 2.0)):
            return
        self._listen()
        while not await self._stopped_within(0.5):
            linked = bool(self._next) and self._network_to(self._next)
            self.beat = Heartbeat(linked=linked)
            on_beat(self.beat)
            if linked:
                self._broken_s = 0.0
                if not self.board.ready:
                    self.board.publish(StageReady())
            elif self._next:
                self._broken_s += 0.5
                if self._broken_s == LOST_AFTER_S:
                    self.board.publish(StageHopLost("as simulated"))
            if self._broken_s > LOST_AFTER_S + HOP_LOST_S or (self._rng.random() < self.peer.runner_death):
                return

    def _listen(self) -> None:
        self.board.publish(StageListening(self.endpoint, 1))

    async def link(self, endpoint: str, *, keep_stream: bool = False) -> None:
        self._next = endpoint

    async def change(self, plan: Plan, stage: int, keep_kv_from: int) -> None:
        old, self.board = self.board, StatusBoard()
        old.fail(StageLostError.code, "goes on by another ballot")
        if not self.alive:
            raise StageLostError("gone")
        self.plan, self.index = plan, stage
        self._next, self._broken_s = "", 0.0
        self._ledger.change(self)
        self._listen()

    async def stop(self) -> None:
        self._stopping.set()
        await self._gone.wait()

    def _network_to(self, endpoint: str) -> bool:
        port = endpoint.rpartition(":")[2]
        found = [one for name, one in self._ledger.by_endpoint.items() if name.rpartition(":")[2] == port]
        return bool(found) and found[0].alive and self.peer.network.connected(self.peer.address, found[0].peer.address)

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
            await asyncio.sleep(self._rng.uniform(0.0, 1.0))  # a process takes time to end
            return True
        return False


class SimNode(SimPeer):
    """exo_mesh.node.node.Node without sockets, disks and child processes."""

    def __init__(self, network: Network, ledger: Ledger, index: int, incarnation: int) -> None:
        self.ledger = ledger
        self.rng = random.Random(network.rng.random())
        self.runner_death = 0.0
        self.running: dict[str, int] | None = None
        """Requests of clients of this node by instance; None: unknown."""
        super().__init__(network, index, incarnation, LAN)
        self.process.context.run(self._wire)

    def _wire(self) -> None:
        membership, settings = self.membership, Settings(home=Path("/nowhere"), name=f"n{self.index}", min_peers=1)
        nothing, metrics = cast(Any, Nothing()), Metrics(self.network.loop.time)
        catalogue: Any = OneModel()
        models = LocalModels(lambda name: CARD, lambda name: Path("/nowhere"))
        clock = self.network.loop.time
        around, free = StageSurroundings(membership), MemoryReading(30 * GB, 24 * GB)
        history = RunnerHistory.build(settings, membership.own.id, Disk(settings.home), clock)
        make: Any = lambda label, start, *args, **kwargs: SimRunner(self, start)  # noqa: E731
        starter = RunnerStarter(
            settings, models, lambda: free, None, USUAL_LIMITS, history, around.engines, make, why_no_layers=""
        )
        memory = StageMemory(lambda: free)
        self.host = StageHost("", around, models, lambda engine, architecture: "", memory, starter, metrics, clock)
        members = Members(self.host, membership)
        surveys: Any = AnyCut()
        here = Here(self.host.usable_bytes, self.host.memory.capacity_bytes, lambda card: ())
        pool = CandidatePool(self.membership, here)
        limits = RunnerLimits()
        groups = GroupKnowledge(settings, nothing, membership.view.peers, list, nothing, self.network.loop.time)
        effective = EffectiveSettings(settings)
        planner = Planner(effective, membership, surveys, nothing, pool, groups)
        use = RingUse(membership, members, lambda: self.running)
        self.placer = Placer(planner, membership, members, nothing, pool, limits, groups, use)
        self.network.listens = self.ledger.listens
        recoverer = Recoverer(membership, members, catalogue, planner, nothing, nothing, limits, use)
        self.owned_rings = OwnedRings(membership, members, recoverer, limits, use)
        self.instances = Instances(
            membership, self.owned_rings, self.placer, catalogue, recoverer, self.rng, self.network.loop.time
        )

    def answers(self) -> list[AnyAnswer]:
        instances, unused = self.instances, self.owned_rings.unused
        return [
            *super().answers(),
            *hosting_calls.answers(self.host, self.membership),
            *instance_calls.answers(self.membership, instances.delete_own, unused.wish_idle),
        ]

    def describe(self) -> PeerInfo:
        own = super().describe()
        return replace(own, devices=(replace(own.devices[0], engine="dummy"),), models=(MODEL,))

    def reading(self) -> Telemetry:
        return replace(super().reading(), entry_requests=self.owned_rings.use.own_report())

    def peer_left(self, peer: PeerInfo, records: list[Record]) -> None:
        super().peer_left(peer, records)
        self.owned_rings.owner_left(peer, records)

    async def before_refute(self) -> None:
        await self.owned_rings.free_beaten()

    def begin(self, seeds: Any) -> None:
        super().begin(seeds)
        self.do(self.host.start)
        self.do(self.owned_rings.start)

    async def place(self, spec: InstanceSpec) -> None:
        with contextlib.suppress(MeshError):
            await self.instances.ensure(spec)

    async def delete(self, instance_id: str) -> None:
        with contextlib.suppress(MeshError):
            await self.instances.delete(instance_id)
