"""Builds the parts of a node that run stages on this machine."""

from __future__ import annotations

import msgspec

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.device import why_no_layers
from exo_mesh.engine.registry import Registry
from exo_mesh.machine import this_machine
from exo_mesh.machine.pressure import MemoryMonitor
from exo_mesh.machine.wiring import MachineParts
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.local_models import LocalModels
from exo_mesh.rings.hosting.runner_starter import HostLimits, RunnerHistory, RunnerStarter
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.rings.hosting.stage_memory import StageMemory
from exo_mesh.rings.hosting.supervisor import Runner
from exo_mesh.rings.hosting.surroundings import StageSurroundings
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.settings.config import Settings


class HostingParts(msgspec.Struct, frozen=True):
    """The stages here, the history of their runners, and the monitor that reports memory pressure to them."""

    host: StageHost
    runner_history: RunnerHistory
    monitor: MemoryMonitor

    @staticmethod
    def build(
        settings: Settings,
        registry: Registry,
        membership: Membership,
        models: LocalModels,
        machine: MachineParts,
        metrics: Metrics,
        limits: HostLimits,
        clock: Clock,
        credentials: CredentialSource | None,
    ) -> HostingParts:
        around, why = StageSurroundings(membership), why_no_layers(settings.role, settings.max_memory_bytes)
        runner_history = RunnerHistory.build(settings, membership.own.id, machine.disk, clock)
        starter = RunnerStarter(
            settings, models, machine.memory, credentials, limits, runner_history, around.engines, Runner, why
        )
        host = StageHost(
            settings.name,
            around,
            models,
            lambda engine, architecture: this_machine.why_not(registry, engine, architecture),
            StageMemory(machine.memory, settings.max_memory_bytes, why),
            starter,
            metrics,
            clock,
            credentials,
        )
        monitor = MemoryMonitor(
            machine.system_memory,
            host.press,
            host.needs,
            threshold=settings.memory_threshold,
            poll_s=settings.memory_poll_interval,
        )
        return HostingParts(host, runner_history, monitor)
