"""What the HTTP API asks when somebody looks for what goes wrong. `inspection.desk.Inspection` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from exo_mesh.serving.traces import RequestTrace


class InspectionService(Protocol):
    """Of this node, of one peer, or of the whole mesh. Every answer is bounded, and peers that do not answer are named
    in it. key_id: only requests that came with this API key, "" for those without one; None for all.

    Raises MeshErrors only where one peer alone is asked.
    """

    @property
    def trace_export(self) -> dict[str, Any] | None:
        """How sending traces to a collector goes: "endpoint", "protocol", "error", and spans "sent", "dropped" and
        "waiting". None if no collector is named."""

    def traces(self, key_id: str | None = None) -> list[dict[str, Any]]:
        """The traced requests that entered here, newest first."""

    async def cluster_traces(self, key_id: str | None = None) -> dict[str, Any]:
        """{"data": those of all peers, "unreachable": [{"id", "name", "why"}]}"""

    async def trace(self, wanted: str, key_id: str | None = None) -> RequestTrace | None:
        """One of any peer, by its trace id or any id of its request that the client saw; None if there is none."""

    async def delete_traces(self, trace_ids: Sequence[str] | None) -> dict[str, Any]:
        """Delete traces at all peers; None: all of them. {"deleted": how many, "unreachable"}"""

    async def diagnostics_of(self, peer_id: str = "") -> dict[str, Any] | None:
        """What a node can tell of itself: this one, or a live peer by its id or the first digits of it; None if there
        is none."""

    async def cluster_diagnostics(self) -> dict[str, Any]:
        """{"nodes": [as diagnostics_of], "unreachable": [{"id", "name", "why"}]}"""

    async def cluster_timeline(self) -> dict[str, Any]:
        """{"entries": [phases of all runners of the mesh by time], "left_out", "unreachable"}"""

    def node_timeline(self) -> list[dict[str, Any]]:
        """The phases of the runners of this node by time."""

    async def capture(self, peer_id: str = "", runner: str = "") -> dict[str, Any] | None:
        """Stacks and memory maps, taken now, of a node (as in diagnostics_of) and its runners, or of one runner by its
        pid, instance or label; None if there is none. Raises OverloadError while that node captures already."""

    async def cancel_runner(self, peer_id: str, runner: str, request_id: str = "") -> dict[str, Any] | None:
        """Cancel the requests that run on a runner of a node, or only those with an id: {"instance", "cancelled",
        "unreachable"}. None if there is no such node or runner."""
