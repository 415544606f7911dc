"""Builds the parts of a node that run stages on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.engine.registry import Registry
from exo_mesh.machine import this_machine
from exo_mesh.machine.parts import MachineParts
from exo_mesh.machine.pressure import MemoryMonitor
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.local_models import LocalModels
from exo_mesh.rings.hosting.peer_desk import PeerDesk
from exo_mesh.rings.hosting.runner_starter import HostLimits, RunnerHistory
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.settings.config import Settings


@dataclass(frozen=True, slots=True)
class HostingParts:
    """The stages here, the history of their runners, and the monitor that reports memory pressure to them."""

    host: StageHost
    runner_history: RunnerHistory
    monitor: MemoryMonitor
    peer_desk: PeerDesk

    @staticmethod
    def at(
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
        def hosts_of(peer_id: str) -> Sequence[str]:
            peer = membership.peer(peer_id)
            return peer.hosts if peer is not None else []

        def name_of(peer_id: str) -> str:
            peer = membership.peer(peer_id)
            return peer.info.name if peer is not None else peer_id[:8]

        metrics.stages.name_of = name_of
        runner_history = RunnerHistory.at(settings, membership.own.id, machine.disk, clock)
        host = StageHost(
            membership.own.id,
            settings,
            models,
            lambda engine, architecture: this_machine.why_not(registry, engine, architecture),
            machine.memory,
            metrics,
            limits=limits,
            clock=clock,
            credentials=credentials,
            hosts_of=hosts_of,
            is_out_of_reach=membership.is_out_of_reach,
            is_silent=lambda peer_id: not membership.is_alive(peer_id) or membership.unanswered_s(peer_id) > 0,
            fence_of=membership.fences.ballot,
            engine=lambda: next((device.engine for device in membership.own.devices), ""),
            keep=runner_history,
        )
        host.on_use = membership.check_partners
        monitor = MemoryMonitor(
            machine.system_memory,
            host.press,
            host.needs,
            threshold=settings.memory_threshold,
            poll_s=settings.memory_poll_interval,
        )
        return HostingParts(host, runner_history, monitor, PeerDesk(membership))
