"""Periodic work of a node: finds changed models, updates gauges, and publishes changed addresses and cables."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from msgspec.structs import replace

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.base.wakeups import next_wakeup, until_wakeup
from exo_mesh.domain.thunderbolt import rdma_ports
from exo_mesh.machine import this_machine
from exo_mesh.machine.awake import SleepLock, commands_here
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.thunderbolt_readings import has_thunderbolt_tools, read_thunderbolt
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.downloads.service import Downloads
from exo_mesh.models.wiring import ModelParts
from exo_mesh.node.gauges import describe_node, show_downloads, show_machine, show_mesh
from exo_mesh.node.health import Health
from exo_mesh.node.observation import Observation
from exo_mesh.node.own_engines import OwnEngines
from exo_mesh.rings.hosting.wiring import HostingParts

RESCAN_EVERY_S = 10.0
ROUND_S = 1.0

ADDRESSES_EVERY_S = 3.0

CABLES_EVERY_S = 5.0
"""The mesh knows of a pulled cable after this time, 1 to 2 s of the tools, and the gossip."""

_log = logging.getLogger(__name__)


class Housekeeping:
    """Looks for changed models and files, and shows the state of this node in its metrics."""

    def __init__(
        self,
        membership: Membership,
        models: ModelParts,
        hosting: HostingParts,
        engines: OwnEngines,
        health: Health,
        disk: Disk,
        metrics: Metrics,
        clock: Clock,
        phase: Callable[[], str],
    ) -> None:
        """phase: see Health.describe."""
        self._membership = membership
        self._models = models
        self._hosting = hosting
        self._engines = engines
        self._health = health
        self._disk = disk
        self._metrics = metrics
        self._clock = clock
        self._phase = phase
        self._rescan_at = clock() + RESCAN_EVERY_S

    async def keep(self) -> None:
        """Runs until cancelled: one round at each change of the view, and every ROUND_S."""
        describe_node(self._metrics, self._membership)
        while True:
            await self._look()
            self._show()
            await self._membership.changed.wait(until_wakeup(ROUND_S))

    async def _look(self) -> None:
        catalogue, room = self._models.catalogue, self._models.downloads.room
        await catalogue.learn()
        await room.sweep_if_changed()
        if self._disk.is_failing:  # to notice when writing works again
            await asyncio.to_thread(self._disk.check)
        if self._clock() >= self._rescan_at or catalogue.is_due:
            self._rescan_at = self._clock() + RESCAN_EVERY_S
            await self._engines.announce_models()
            await room.refresh()

    def _show(self) -> None:
        metrics, host = self._metrics, self._hosting.host
        metrics.set_reasons((reason.code, reason.level) for reason in self._health.reasons())
        show_machine(metrics, host, self._hosting.monitor, self._disk)
        show_downloads(metrics, self._models.downloads.tally)
        show_mesh(metrics, self._membership)
        metrics.draining.set(host.draining)
        metrics.ready.set(self._phase() == "ok" and not host.draining)


async def keep_addresses(membership: Membership, host: str, port: int, types: Collection[str] = ()) -> None:
    """Checks the node's addresses every ADDRESSES_EVERY_S, without end, and publishes them when they change."""
    while True:
        await next_wakeup(ADDRESSES_EVERY_S)
        now = this_machine.addresses(host, port, types)
        if now != membership.own.addresses:
            _log.info("the addresses of this node changed to %s", ", ".join(now))
            membership.describe(replace(membership.own, addresses=now))


async def keep_rdma_ports(membership: Membership) -> None:
    """Publishes changes of this machine's Thunderbolt ports until cancelled; returns at once if there can be none."""
    if not has_thunderbolt_tools():
        return
    while True:
        ports = rdma_ports(await asyncio.to_thread(read_thunderbolt))
        if ports != membership.own.rdma_ports:
            membership.describe(replace(membership.own, rdma_ports=ports))
        await next_wakeup(CABLES_EVERY_S)


async def keep_awake(observation: Observation, downloads: Downloads) -> None:
    """Keeps this machine awake while it works, until cancelled; returns at once if the system has no way to do that."""

    def work() -> str:
        return observation.work() or ("files are being downloaded" if downloads.tally.running else "")

    await SleepLock(work, commands_here()).keep()
