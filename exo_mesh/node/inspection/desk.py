"""Implements all troubleshooting calls of a node: diagnostics, traces, captures and cancellation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from exo_mesh.domain.reports import HealthReport
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.inspection import calls
from exo_mesh.node.inspection.captures import Captures
from exo_mesh.node.inspection.diagnostics import Diagnostics
from exo_mesh.node.inspection.mesh_traces import MeshTraces
from exo_mesh.node.inspection.otlp.exporter import TraceExporter
from exo_mesh.node.inspection.runner_cancels import RunnerCancels
from exo_mesh.node.inspection.trace_keeper import DAY_S, TraceKeeper
from exo_mesh.rings.hosting.wiring import HostingParts
from exo_mesh.rings.serving.traces import RequestTrace
from exo_mesh.rings.serving.wiring import ServingParts
from exo_mesh.settings.config import Settings
from exo_mesh.wire.peer_call import AnyAnswer, answer


class Inspection:
    """Implements InspectionService. health: returns the body of GET /health. exporter: sends traces to a
    collector; None without one. answers: to the calls of peers."""

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
        captures = Captures(own.id, own.name, lambda: hosting.host.runners)
        self._cancels = RunnerCancels(membership, serving.journal)
        traces = serving.router.traces
        self.answers: list[AnyAnswer] = [
            answer(calls.DIAGNOSE, partial(calls.answer_diagnose, self.diagnostics.node, self.diagnostics.timeline)),
            answer(calls.READ_TRACES, partial(calls.answer_read_traces, traces)),
            answer(calls.DELETE_TRACES, partial(calls.answer_delete_traces, traces)),
            answer(calls.CAPTURE, partial(calls.answer_capture, captures.here)),
        ]

    @property
    def trace_export(self) -> dict[str, Any] | None:
        """The state of the export of traces; None without a collector."""
        return None if self.exporter is None else self.exporter.describe()

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
        return await calls.capture(self._membership.calls, self._membership.peer_named(peer, "id").id, runner)

    async def cancel_runner(self, peer: str, runner: str, request_id: str = "") -> dict[str, Any] | None:
        instance_id = self._cancels.instance_of(self._membership.peer_named(peer, "id").id, runner)
        return await self._cancels.cancel(instance_id, request_id) if instance_id else None
