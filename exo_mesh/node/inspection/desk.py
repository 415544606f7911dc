"""Implements all troubleshooting calls of a node: diagnostics, traces, captures and cancellation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from exo_mesh.domain.reports import HealthReport
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.inspection.captures import Captures
from exo_mesh.node.inspection.diagnostics import Diagnostics
from exo_mesh.node.inspection.mesh_traces import MeshTraces
from exo_mesh.node.inspection.otlp.exporter import TraceExporter
from exo_mesh.node.inspection.runner_cancels import RunnerCancels
from exo_mesh.node.inspection.trace_keeper import DAY_S, TraceKeeper
from exo_mesh.rings.hosting.parts import HostingParts
from exo_mesh.rings.serving.parts import ServingParts
from exo_mesh.rings.serving.traces import RequestTrace
from exo_mesh.settings.config import Settings
from exo_mesh.wire.proto import control_pb2 as pb


class Inspection:
    """Implements InspectionService, and answers peers. health: returns the body of GET /health. exporter:
    sends traces to a collector; None without one."""

    def __init__(
        self,
        settings: Settings,
        membership: Membership,
        hosting: HostingParts,
        serving: ServingParts,
        disk: Disk,
        health: Callable[[], HealthReport],
        exporter: TraceExporter | None,
    ) -> None:
        own = membership.own
        self._membership = membership
        self.diagnostics = Diagnostics(
            membership,
            hosting.runner_history.flights,
            serving.journal,
            hosting.monitor,
            disk,
            hosting.host.beats,
            health,
        )
        days, directory = settings.trace_retention_days, settings.home / "traces" / own.id
        keeper = TraceKeeper(serving.router.traces, directory, disk, days * DAY_S if days else None)
        self.keep_traces = keeper.keep
        self.exporter = exporter
        self._traces = MeshTraces(membership, serving.router.traces)
        self._captures = Captures(own.id, own.name, lambda: hosting.host.runners)
        self._cancels = RunnerCancels(membership, serving.journal)

    @property
    def trace_export(self) -> dict[str, Any] | None:
        """The state of the export of traces; None without a collector."""
        return None if self.exporter is None else self.exporter.describe()

    # for users

    def traces(self, key_id: str | None = None) -> list[dict[str, Any]]:
        return self._traces.here(key_id)

    async def cluster_traces(self, key_id: str | None = None) -> dict[str, Any]:
        return await self._traces.everywhere(key_id)

    async def trace(self, wanted: str, key_id: str | None = None) -> RequestTrace | None:
        return await self._traces.find(wanted, key_id)

    async def delete_traces(self, trace_ids: Sequence[str] | None) -> dict[str, Any]:
        return await self._traces.delete(trace_ids)

    async def diagnostics_of(self, peer: str = "") -> dict[str, Any]:
        return await self.diagnostics.of(peer)

    async def cluster_diagnostics(self) -> dict[str, Any]:
        return await self.diagnostics.cluster()

    async def cluster_timeline(self) -> dict[str, Any]:
        return await self.diagnostics.cluster_timeline()

    def node_timeline(self) -> list[dict[str, Any]]:
        return self.diagnostics.node_timeline()

    async def capture(self, peer: str = "", runner: str = "") -> dict[str, Any] | None:
        found = self._membership.peer(self._membership.peer_named(peer, "id").id)
        return await (self._captures.here(runner) if found is None else self._captures.of(found, runner))

    async def cancel_runner(self, peer: str, runner: str, request_id: str = "") -> dict[str, Any] | None:
        instance_id = self._cancels.instance_of(self._membership.peer_named(peer, "id").id, runner)
        return await self._cancels.cancel(instance_id, request_id) if instance_id else None

    # for peers

    def answer_read_traces(self, request: pb.ReadTracesRequest) -> pb.ReadTracesReply:
        return self._traces.answer_read(request)

    def answer_delete_traces(self, request: pb.DeleteTracesRequest) -> pb.DeleteTracesReply:
        return self._traces.answer_delete(request)

    async def answer_capture(self, request: pb.CaptureRequest) -> pb.CaptureReply:
        return await self._captures.answer(request)
