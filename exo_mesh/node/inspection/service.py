"""The interface of the HTTP API to troubleshooting. `inspection.desk.Inspection` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from exo_mesh.rings.serving.traces import RequestTrace


class InspectionService(Protocol):
    """Inspects this node, one peer, or the whole mesh. Every answer is bounded and lists peers that do not answer.

    key_id: only requests with this API key, "" for requests without one, None for all. peer: see
    Membership.peer_named. Only calls for a single peer raise MeshErrors.
    """

    @property
    def trace_export(self) -> dict[str, Any] | None:
        """The state of the export of traces: "endpoint", "protocol", "error", and numbers of spans "sent", "dropped"
        and "waiting". None without a collector."""

    def traces(self, key_id: str | None = None) -> list[dict[str, Any]]:
        """The traced requests that entered here, newest first."""

    async def cluster_traces(self, key_id: str | None = None) -> dict[str, Any]:
        """The traces of all peers: {"data", "unreachable": [{"id", "name", "why"}]}."""

    async def trace(self, wanted: str, key_id: str | None = None) -> RequestTrace | None:
        """A trace on any peer, by its id or any id of its request that the client saw; None if there is none."""

    async def delete_traces(self, trace_ids: Sequence[str] | None) -> dict[str, Any]:
        """Deletes traces at all peers, None: all traces. Returns {"deleted": number, "unreachable"}."""

    async def diagnostics_of(self, peer: str = "") -> dict[str, Any]:
        """The diagnostics of this node, or of a live peer."""

    async def cluster_diagnostics(self) -> dict[str, Any]:
        """The diagnostics of all nodes: {"nodes": [as diagnostics_of], "unreachable": [{"id", "name", "why"}]}."""

    async def cluster_timeline(self) -> dict[str, Any]:
        """The phases of all runners of the mesh by time: {"entries", "left_out", "unreachable"}."""

    def node_timeline(self) -> list[dict[str, Any]]:
        """The phases of the runners of this node by time."""

    async def capture(self, peer: str = "", runner: str = "") -> dict[str, Any] | None:
        """Takes stacks and memory maps of a node and its runners, or of one runner by its pid, instance or label; None
        if there is no such runner. Raises OverloadError while another capture runs on that node."""

    async def cancel_runner(self, peer: str, runner: str, request_id: str = "") -> dict[str, Any] | None:
        """Cancels the requests on a runner of a node, or only those with an id; returns {"instance", "cancelled",
        "unreachable"}, or None if there is no such runner."""
