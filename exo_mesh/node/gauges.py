"""Copies the state of a node's parts into its metrics; housekeeping calls these functions each round."""

from __future__ import annotations

import platform

from exo_mesh import __version__
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.pressure import MemoryMonitor
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.downloads.tally import DownloadTally
from exo_mesh.rings.hosting.stage_host import StageHost


def describe_node(metrics: Metrics, membership: Membership) -> None:
    """Sets the metrics that do not change while the node runs."""
    own = membership.own
    metrics.build_info.labels(__version__, str(own.protocols), platform.python_version())
    metrics.node_info.labels(own.name, own.id, own.namespace)


def show_machine(metrics: Metrics, host: StageHost, monitor: MemoryMonitor, disk: Disk) -> None:
    metrics.usable_memory.set(host.usable_bytes())
    metrics.reserved_memory.set(host.memory.reserved_bytes)
    metrics.memory.labels("total").set(monitor.last.total_bytes)
    metrics.memory.labels("available").set(monitor.last.available_bytes)
    metrics.memory_peak.set(monitor.peak_share)
    metrics.memory_level.set(monitor.level)
    metrics.disk_free.labels("home").set(disk.free_bytes)
    metrics.disk_refused.labels().set(disk.refused)


def show_downloads(metrics: Metrics, tally: DownloadTally) -> None:
    metrics.downloads_in_progress.set(tally.running)
    metrics.download_files.labels().set(tally.files)
    for outcome, count in tally.ended.items():
        metrics.downloads.labels(outcome).set(count)
    for code, count in tally.failed.items():
        metrics.download_failures.labels(code).set(count)
    for source, count in tally.received_bytes.items():
        metrics.download_bytes.labels(source).set(count)


def show_mesh(metrics: Metrics, membership: Membership) -> None:
    """Sets the metrics of peers, instances and engines, and removes the series of gone ones."""
    peers, view = membership.peers, membership.view
    metrics.nodes.set(len(peers) + 1)
    metrics.set_round_trips({peer.info.name: peer.rtt_ms / 1000 for peer in peers if peer.rtt_ms})
    placed = [info for _, info in view.instances()]
    metrics.instances.clear()
    for info in placed:
        metrics.instances.labels(info.plan.model, str(info.state)).inc()
    metrics.engine_info.clear()
    for device in membership.own.devices:
        for engine in device.details:
            metrics.engine_info.labels(engine.name, engine.version, engine.compute, device.name)
    metrics.tick({info.plan.instance_id: info.plan.model for info in placed}, {peer.info.name for peer in peers})
