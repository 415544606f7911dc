"""All troubleshooting calls of a node: diagnostics, traces, captures and cancellation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from exo_mesh.domain.reports import HealthReport
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.inspection import calls
from exo_mesh.node.inspection.asking import ask_peers
from exo_mesh.node.inspection.captures import Captures
from exo_mesh.node.inspection.diagnostics import Diagnostics
from exo_mesh.node.inspection.trace_keeper import DAY_S, TraceKeeper
from exo_mesh.rings.hosting.wiring import HostingParts
from exo_mesh.rings.serving.calls import cancel_on
from exo_mesh.rings.serving.traces import RequestTrace
from exo_mesh.rings.serving.wiring import ServingParts
from exo_mesh.settings.config import Settings
from exo_mesh.wire.peer_call import AnyAnswer, answer

if TYPE_CHECKING:
    from exo_mesh.node.inspection.otlp.exporter import TraceExporter


class InspectionService:
    """Inspects this node, one peer, or the whole mesh. Every answer is bounded and lists peers that do not answer.

    health: returns the body of GET /health. exporter: sends traces to a collector; None without one. answers: to the
    calls of peers. key_id: only requests with this API key, "" for requests without one, None for all. peer: see
    Membership.peer_named. Only calls for a single peer raise MeshErrors.
    """

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
        self._traces, self._journal = serving.router.traces, serving.journal
        keeper = TraceKeeper(self._traces, directory, disk, days * DAY_S if days else None)
        self.keep_traces = keeper.keep
        self.exporter = exporter
        captures = Captures(own.id, own.name, lambda: hosting.host.runners)
        self.answers: list[AnyAnswer] = [
            answer(calls.DIAGNOSE, partial(calls.answer_diagnose, self.diagnostics.node, self.diagnostics.timeline)),
            answer(calls.READ_TRACES, partial(calls.answer_read_traces, self._traces)),
            answer(calls.DELETE_TRACES, partial(calls.answer_delete_traces, self._traces)),
            answer(calls.CAPTURE, partial(calls.answer_capture, captures.here)),
        ]

    @property
    def trace_export(self) -> dict[str, Any] | None:
        """The state of the export of traces: "endpoint", "protocol", "error", and numbers of spans "sent", "dropped"
        and "waiting". None without a collector."""
        return None if self.exporter is None else self.exporter.describe()

    def traces(self, key_id: str | None = None) -> list[dict[str, Any]]:
        """The traced requests that entered here, newest first."""
        return [trace.describe() for trace in self._traces.all(key_id)]

    async def cluster_traces(self, key_id: str | None = None) -> dict[str, Any]:
        """The traces of all peers: {"data": as `traces`, with "peer" and "peer_name", "unreachable": [{"id", "name",
        "why"}]}."""
        own, peer_calls = self._membership.own, self._membership.calls
        answers, unreachable = await ask_peers(
            self._membership, lambda peer: calls.read_traces(peer_calls, peer.id, key_id)
        )
        rows = [(own.id, own.name, trace) for trace in self._traces.all(key_id)]
        rows += [(peer.id, peer.info.name, trace) for peer, traces in answers for trace in traces]
        shown = {}
        for peer_id, name, trace in rows:
            shown[peer_id, trace.trace_id, trace.request_id] = {**trace.describe(), "peer": peer_id, "peer_name": name}
        data = sorted(shown.values(), key=lambda row: -row["entered"])
        return {"data": data, "unreachable": unreachable}

    async def trace(self, wanted: str, key_id: str | None = None) -> RequestTrace | None:
        """A trace on any peer, by its id or any id of its request that the client saw: the newest; None if there is
        none."""
        found = self._traces.find(wanted, key_id)
        if found is not None:
            return found
        peer_calls = self._membership.calls
        answers, _ = await ask_peers(
            self._membership, lambda peer: calls.read_traces(peer_calls, peer.id, key_id, wanted)
        )
        traces = [trace for _, answer in answers for trace in answer]
        return max(traces, key=lambda trace: trace.entered, default=None)

    async def delete_traces(self, trace_ids: Sequence[str] | None) -> dict[str, Any]:
        """Deletes traces at all peers, None: all traces. Returns {"deleted": number, "unreachable"}."""
        peer_calls = self._membership.calls
        answers, unreachable = await ask_peers(
            self._membership, lambda peer: calls.delete_traces(peer_calls, peer.id, trace_ids)
        )
        here = self._traces.delete(None if trace_ids is None else frozenset(trace_ids))
        return {"deleted": here + sum(count for _, count in answers), "unreachable": unreachable}

    async def capture(self, peer: str = "", runner: str = "") -> dict[str, Any] | None:
        """Takes stacks and memory maps of a node and its runners, or of one runner by its pid, instance or label; None
        if there is no such runner. Raises OverloadError while another capture runs on that node."""
        return await calls.capture(self._membership.calls, self._membership.peer_named(peer, "id").id, runner)

    async def cancel_runner(self, peer: str, runner: str, request_id: str = "") -> dict[str, Any] | None:
        """Cancels the requests on a runner of a node, or only those with an id, at their entry peers, which frees them
        on every stage within one lap. Returns {"instance", "cancelled": number, "unreachable"}, or None if there is no
        such runner."""
        instance_id = self._instance_of(self._membership.peer_named(peer, "id").id, runner)
        if not instance_id:
            return None
        peer_calls = self._membership.calls
        here = self._journal.cancel_on(instance_id, request_id)
        answers, unreachable = await ask_peers(
            self._membership, lambda peer: cancel_on(peer_calls, peer.id, instance_id, request_id)
        )
        cancelled = here + sum(count for _, count in answers)
        return {"instance": instance_id, "cancelled": cancelled, "unreachable": unreachable}

    def _instance_of(self, peer_id: str, runner: str) -> str:
        """Finds the instance of a runner on a peer, by the instance id, or the runner's pid or label; "" if none."""
        for _, instance in self._membership.view.instances():
            plan = instance.plan
            for index, stage in enumerate(plan.stages):
                if peer_id not in stage.peers:
                    continue
                pid = instance.pids[index] if index < len(instance.pids) else 0
                label = f"{plan.instance_id}[{stage.shard.start}:{stage.shard.stop}]"
                if runner in (plan.instance_id, label, str(pid)) or runner.startswith(f"{label} rank "):
                    return plan.instance_id
        return ""
