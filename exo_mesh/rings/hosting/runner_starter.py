"""Starts the process of a stage: its message, environment, limits, and a spare process if there is one."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from msgspec import structs
from msgspec.structs import replace

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.stage_metrics import ModelFacts
from exo_mesh.domain.fast_synch import runner_environment
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.tensor_group import RankWiring, sharded
from exo_mesh.domain.wiring_rules import RING_VERBOSE
from exo_mesh.errors import StageLostError
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.memory import MemoryReader
from exo_mesh.rings.hosting.flight_recorder import FlightRecorder
from exo_mesh.rings.hosting.guard import Guard
from exo_mesh.rings.hosting.local_models import LocalModels
from exo_mesh.rings.hosting.pid_files import PidFiles
from exo_mesh.rings.hosting.quarantine import Quarantine
from exo_mesh.rings.hosting.reservations import Lease
from exo_mesh.rings.hosting.spares import HeadStart, SparePool
from exo_mesh.rings.hosting.stage_state import start_message
from exo_mesh.rings.hosting.supervisor import RUNNER_COMMAND, Runner
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.settings.config import Settings
from exo_mesh.wire.runner_commands import StartStage

_log = logging.getLogger(__name__)


class HostLimits(msgspec.Struct, frozen=True):
    """The way runners are started, and their time limits."""

    runner: RunnerLimits = msgspec.field(default_factory=RunnerLimits)
    command: Sequence[str] = RUNNER_COMMAND


USUAL_LIMITS = HostLimits()


class RunnerHistory(msgspec.Struct, frozen=True):
    """The memory of this node about its runners after they ended: whether to try again, their last phases, their
    pids."""

    guard: Guard
    flights: FlightRecorder
    pid_files: PidFiles

    @staticmethod
    def build(settings: Settings, own_id: str, disk: Disk, clock: Clock) -> RunnerHistory:
        """The history in the home of a node."""
        quarantine = Quarantine(settings.home / "quarantine" / f"{own_id}.json", disk)
        guard = Guard(own_id, quarantine, settings.engine_options, clock)
        return RunnerHistory(guard, FlightRecorder(), PidFiles(settings.home / "runners" / own_id, disk))


class StartedRunner(msgspec.Struct, frozen=True):
    """A process that has been made for a lease, and what its metrics say of the model."""

    runner: Runner
    facts: ModelFacts


class RunnerStarter:
    """Makes the runner of a lease. history: of the runners here. pace: the measured times of starts and loads here,
    which scale their limits."""

    def __init__(
        self,
        settings: Settings,
        models: LocalModels,
        read_memory: MemoryReader,
        credentials: CredentialSource | None,
        limits: HostLimits,
        keep: RunnerHistory,
        engines: Callable[[], Sequence[str]],
        make_runner: Callable[..., Runner],
        why_no_layers: str,
    ) -> None:
        """engines: of spare runners. why_no_layers: set if this node never holds layers."""
        self._settings = settings
        self._models = models
        self._read_memory = read_memory
        self._credentials = credentials
        self._limits = limits
        self.history = keep
        self._make_runner = make_runner
        self._environment = runner_environment(settings.fast_synch, os.environ)
        if settings.log_level == "debug":
            self._environment.setdefault(RING_VERBOSE, "1")
        num_spares = 0 if why_no_layers else settings.spare_runners
        self.spares = SparePool(num_spares, engines, limits.command, self._environment)
        self.pace = RunnerPace()

    async def start(self, lease: Lease, rank: int, wiring: RankWiring | None, head_start: HeadStart) -> StartedRunner:
        """Make a runner, and note in the lease what its stage will hold. Raises StageLostError if the model's server is
        gone, ModelError and UnknownModelError for files."""
        plan = lease.plan
        start = await self._message(lease, wiring)
        card = await asyncio.to_thread(self._models.card, plan.model)
        held = sharded(card, len(lease.stage.peers))
        lease.weights_bytes = held.shard_bytes(lease.stage.shard.start, lease.stage.shard.stop)
        lease.step_bytes = held.step_bytes(lease.stage.shard.start, lease.stage.shard.stop)
        label = f"{plan.instance_id}[{lease.stage.shard.start}:{lease.stage.shard.stop}]"
        label += f" rank {rank}" if wiring is not None else ""
        runner = self._make_runner(
            label,
            start,
            self._settings.host,
            limits=self._runner_limits(lease.stage.engine),
            command=self._limits.command,
            environment=self._environment,
            spare=(self.spares.take(lease.stage.engine) or head_start.take()) if wiring is None else None,
            flight=self.history.flights.open(label),
            pid_files=self.history.pid_files,
        )
        size = gigabytes(lease.weights_bytes)
        _log.info("loading stage %s of %s with %s, %s of weights", label, plan.model, lease.stage.engine, size)
        return StartedRunner(runner, ModelFacts(card.architecture, card.dtype, card.num_layers))

    async def _message(self, lease: Lease, wiring: RankWiring | None) -> StartStage:
        """The message for a new process."""
        plan, home = lease.plan, self._settings.home
        model_dir = home if plan.takes_text else await asyncio.to_thread(self._models.find, plan.model)
        start = start_message(lease, model_dir, self._settings, self._credentials, wiring, self._read_memory())
        if not plan.takes_text:
            return start
        served = self._models.served(plan.model)
        if served is None:
            raise StageLostError(f"no model server beside this node serves {plan.model} any more")
        return structs.replace(start, served=served, options=self._models.server_options(served))

    def _runner_limits(self, engine: str) -> RunnerLimits:
        return replace(self.pace.scaled(self._limits.runner, engine), stacks_every_s=float(self._settings.hang_debug))


SLOWER = 8.0
"""A load may be this much slower than the slowest of the last loads of its engine: other programs may use the disk."""


class RunnerPace(msgspec.Struct):
    """Durations of the last starts and loads on this machine. `scaled` only ever grants more time than the defaults."""

    _starts_s: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=16))
    _bytes_per_s: dict[str, deque[float]] = msgspec.field(default_factory=dict)

    def started(self, seconds: float) -> None:
        """Note the seconds from the start of a runner to its first report."""
        self._starts_s.append(seconds)

    def loaded(self, engine: str, num_bytes: int, seconds: float) -> None:
        """Note the load of a stage with `num_bytes` of weights."""
        if num_bytes > 0 and seconds > 0:
            self._bytes_per_s.setdefault(engine, deque(maxlen=16)).append(num_bytes / seconds)

    def scaled(self, limits: RunnerLimits, engine: str) -> RunnerLimits:
        """The limits for the next runner of an engine here."""
        slowest = min(self._bytes_per_s.get(engine, ()), default=limits.load_bytes_per_s * SLOWER)
        return replace(
            limits,
            first_message_s=max(limits.first_message_s, SLOWER * max(self._starts_s, default=0.0)),
            load_bytes_per_s=min(limits.load_bytes_per_s, slowest / SLOWER),
        )
