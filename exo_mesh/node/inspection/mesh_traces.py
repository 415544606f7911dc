"""Reads and deletes traces in the whole mesh. The entry peer of a request keeps its trace; every peer can show all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.inspection.asking import ask_peers
from exo_mesh.node.inspection.calls import delete_traces, read_traces
from exo_mesh.rings.serving.traces import RequestTrace, TraceStore


class MeshTraces:
    """The traces of the mesh. key_id, in all methods: only requests with this API key, "" for no key, None for all."""

    def __init__(self, membership: Membership, store: TraceStore) -> None:
        self._membership = membership
        self._store = store

    def here(self, key_id: str | None) -> list[dict[str, Any]]:
        """The traces on this node, newest first."""
        return [trace.describe() for trace in self._store.all(key_id)]

    async def everywhere(self, key_id: str | None) -> dict[str, Any]:
        """The traces of all peers: {"data": as `here`, with "peer" and "peer_name", "unreachable": [{"id", "name",
        "why"}]}."""
        own = self._membership.own
        answers, unreachable = await ask_peers(
            self._membership, lambda peer: read_traces(self._membership.calls, peer.id, key_id)
        )
        rows = [(own.id, own.name, trace) for trace in self._store.all(key_id)]
        rows += [(peer.id, peer.info.name, trace) for peer, traces in answers for trace in traces]
        shown = {}
        for peer_id, name, trace in rows:
            shown[peer_id, trace.trace_id, trace.request_id] = {**trace.describe(), "peer": peer_id, "peer_name": name}
        data = sorted(shown.values(), key=lambda row: -row["entered"])
        return {"data": data, "unreachable": unreachable}

    async def find(self, wanted: str, key_id: str | None) -> RequestTrace | None:
        """Finds a trace by its id or by any id of its request that the client saw; the newest if there are several."""
        found = self._store.find(wanted, key_id)
        if found is not None:
            return found
        answers, _ = await ask_peers(
            self._membership, lambda peer: read_traces(self._membership.calls, peer.id, key_id, wanted)
        )
        traces = [trace for _, answer in answers for trace in answer]
        return max(traces, key=lambda trace: trace.entered, default=None)

    async def delete(self, trace_ids: Sequence[str] | None) -> dict[str, Any]:
        """Deletes traces at all peers, None: all traces. Returns {"deleted": number, "unreachable": as in
        `everywhere`}."""
        calls = self._membership.calls
        answers, unreachable = await ask_peers(self._membership, lambda peer: delete_traces(calls, peer.id, trace_ids))
        here = self._store.delete(None if trace_ids is None else frozenset(trace_ids))
        return {"deleted": here + sum(count for _, count in answers), "unreachable": unreachable}
