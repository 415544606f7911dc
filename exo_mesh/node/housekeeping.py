"""Periodic work of a node: finds changed models, updates gauges, and publishes changed addresses and cables."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.base.wakeups import next_beat, until_beat
from exo_mesh.domain.thunderbolt import rdma_ports
from exo_mesh.machine import this_machine
from exo_mesh.machine.awake import SleepLock, commands_here
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.pressure import MemoryMonitor
from exo_mesh.machine.thunderbolt_readings import has_thunderbolt_tools, read_thunderbolt
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.downloads.service import Downloads
from exo_mesh.node.gauges import describe_node, show_downloads, show_machine, show_mesh
from exo_mesh.node.health import Health
from exo_mesh.node.observation import Observation
from exo_mesh.rings.hosting.stage_host import StageHost

RESCAN_EVERY_S = 10.0
ROUND_S = 1.0

MAX_LOOKS = 3
"""Most rescans in one round while models keep changing; the next round continues."""

ADDRESSES_EVERY_S = 3.0

CABLES_EVERY_S = 5.0
"""The mesh knows of a pulled cable after this time, 1 to 2 s of the tools, and the gossip."""

_log = logging.getLogger(__name__)

ModelEngines = tuple[tuple[str, tuple[str, ...]], ...]
"""The engines that run each model on this machine; see PeerInfo.model_engines."""


async def keep_house(
    catalogue: Catalogue,
    membership: Membership,
    host: StageHost,
    monitor: MemoryMonitor,
    metrics: Metrics,
    clock: Clock,
    model_engines: Callable[[], ModelEngines],
    disk: Disk,
    health: Health,
    downloads: Downloads,
    phase: Callable[[], str],
) -> None:
    """Runs until cancelled: one round at each change of the view, and every ROUND_S. model_engines may block."""
    describe_node(metrics, membership)
    rescan_at = clock() + RESCAN_EVERY_S
    while True:
        await catalogue.learn()
        await downloads.room.sweep_if_changed()
        if disk.is_failing:  # to notice when writing works again
            await asyncio.to_thread(disk.check)
        if clock() >= rescan_at or catalogue.is_due:
            rescan_at = clock() + RESCAN_EVERY_S
            await announce_models(catalogue, membership, model_engines)
            await downloads.room.refresh()
        metrics.set_reasons((reason.code, reason.level) for reason in health.reasons())
        show_machine(metrics, host, monitor, disk)
        show_downloads(metrics, downloads.tally)
        show_mesh(metrics, membership)
        metrics.draining.set(host.draining)
        metrics.ready.set(phase() == "ok" and not host.draining)
        await membership.changed.wait(until_beat(ROUND_S))


async def announce_models(
    catalogue: Catalogue, membership: Membership, model_engines: Callable[[], ModelEngines], *, is_sure: bool = False
) -> None:
    """Rescans the local models and publishes them if they changed.

    is_sure: files have just changed, so a rescan that already runs is not enough.
    """
    if is_sure:
        catalogue.look_soon()
    has_news = await catalogue.rescan()
    for _ in range(MAX_LOOKS):
        if not catalogue.is_due:
            break
        has_news |= await catalogue.rescan()
    if has_news:
        engines = await asyncio.to_thread(model_engines)
        names, partial = catalogue.local_names, catalogue.partial_names
        own = replace(membership.own, models=names, partial_models=partial, model_engines=engines)
        membership.describe(own)


async def keep_addresses(membership: Membership, host: str, port: int, types: Collection[str] = ()) -> None:
    """Checks the node's addresses every ADDRESSES_EVERY_S, without end, and publishes them when they change."""
    while True:
        await next_beat(ADDRESSES_EVERY_S)
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
        await next_beat(CABLES_EVERY_S)


async def keep_awake(observation: Observation, downloads: Downloads) -> None:
    """Keeps this machine awake while it works, until cancelled; returns at once if the system has no way to do that."""

    def work() -> str:
        return observation.work() or ("files are being downloaded" if downloads.tally.running else "")

    await SleepLock(work, commands_here()).keep()
