"""The long-lived tasks of a node, from its start to its stop."""

from __future__ import annotations

from functools import partial

from exo_mesh.base.gc_pauses import collect_while_few
from exo_mesh.mesh.membership.paths import PathKeeper
from exo_mesh.node.housekeeping import Housekeeping, keep_addresses, keep_awake, keep_rdma_ports
from exo_mesh.node.wiring import NodeParts
from exo_mesh.rings.hosting.certificate_renewal import Renewal
from exo_mesh.rings.hosting.ring_energy import keep_ring_energy
from exo_mesh.rings.placing.preloading import preload


def start_background(parts: NodeParts, port: int) -> None:
    """Starts the tasks; `parts.tasks` owns them. port: of the control endpoint."""
    _keep_house(parts)
    _keep_machine(parts, port)
    _keep_models(parts)
    _keep_mesh(parts)
    inspection = parts.services.observation.inspection
    parts.tasks.keep(inspection.keep_traces, "traces")
    if inspection.exporter is not None:
        parts.tasks.keep(inspection.exporter.keep, "export of traces")
    parts.tasks.keep(parts.serving.kept.keep_tidy, "kept answers")


def _keep_house(parts: NodeParts) -> None:
    house = Housekeeping(
        parts.membership,
        parts.models,
        parts.hosting,
        parts.engines,
        parts.health,
        parts.machine.disk,
        parts.metrics,
        parts.clock,
        parts.phase,
    )
    parts.tasks.keep(house.keep, "housekeeping")
    parts.tasks.keep(collect_while_few, "garbage collection")


def _keep_machine(parts: NodeParts, port: int) -> None:
    """Tasks that follow this computer: its addresses, cables, memory and power."""
    settings, keep, hardware = parts.settings, parts.tasks.keep, parts.metrics.hardware
    types = settings.interface_type_filter
    keep(partial(keep_addresses, parts.membership, settings.host, port, types), "own addresses")
    keep(partial(keep_rdma_ports, parts.membership), "Thunderbolt ports")
    keep(parts.hosting.monitor.run, "memory monitor")
    if not settings.allow_sleep:
        keep(partial(keep_awake, parts.services.observation, parts.models.downloads), "staying awake")
    parts.machine.meter.start(hardware)
    keep(partial(keep_ring_energy, parts.membership, parts.hosting.host, hardware), "energy of rings")


def _keep_models(parts: NodeParts) -> None:
    """Tasks that load, download, describe and measure models."""
    models, tasks = parts.models, parts.tasks
    find = partial(parts.services.models.find_card, may_download=True)
    tasks.start(preload(parts.owning.instances, parts.settings.preload, find), "preloading")
    tasks.start(models.resume_pulls(parts.membership), "unfinished pulls")
    tasks.keep(models.keep_cards, "model cards")
    tasks.keep(parts.on_disk.keep, "what is on disk")
    tasks.keep(models.served.keep, "model servers")
    needs = parts.engines.needs(parts.hosting.host, lambda: bool(parts.services.observation.work()))
    tasks.keep(partial(models.speeds.keep, needs), "speeds of engines")


def _keep_mesh(parts: NodeParts) -> None:
    """Tasks that measure the ways to peers, and share keys, settings and certificates with them."""
    membership, keep, settings = parts.membership, parts.tasks.keep, parts.settings
    keep(PathKeeper(membership, clock=parts.clock).run, "paths")
    keep(parts.keys.keep, "API keys")
    keep(partial(membership.sleeps.keep, settings.home), "peers that can be woken")
    keep(parts.shared.keep, "shared settings")
    if parts.credentials is not None:
        renew_files = parts.models.exchange.renew
        renewal = Renewal(settings, parts.credentials, membership, parts.hosting.host, renew_files)
        keep(renewal.keep, "renewal of the certificate")
