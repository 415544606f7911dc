"""Reads and deletes traces in the whole mesh. The entry peer of a request keeps its trace; every peer can show all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.inspection.asking import ASK_S, ask_peers
from exo_mesh.node.inspection.trace_formats import trace_from_json, trace_to_json
from exo_mesh.rings.serving.traces import MAX_TRACES, RequestTrace, TraceStore
from exo_mesh.wire.proto import control_pb2 as pb


class MeshTraces:
    """The traces of the mesh. key_id, in all methods: only requests with this API key, "" for no key, None for all."""

    def __init__(self, membership: Membership, store: TraceStore) -> None:
        self._membership = membership
        self._store = store

    # for users

    def here(self, key_id: str | None) -> list[dict[str, Any]]:
        """The traces on this node, newest first."""
        return [trace.describe() for trace in self._store.all(key_id)]

    async def everywhere(self, key_id: str | None) -> dict[str, Any]:
        """The traces of all peers: {"data": as `here`, with "peer" and "peer_name", "unreachable": [{"id", "name",
        "why"}]}."""
        own = self._membership.own
        answers, unreachable = await ask_peers(self._membership, lambda peer: _ask(peer, key_id, ""))
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
        answers, _ = await ask_peers(self._membership, lambda peer: _ask(peer, key_id, wanted))
        traces = [trace for _, answer in answers for trace in answer]
        return max(traces, key=lambda trace: trace.entered, default=None)

    async def delete(self, trace_ids: Sequence[str] | None) -> dict[str, Any]:
        """Deletes traces at all peers, None: all traces. Returns {"deleted": number, "unreachable": as in
        `everywhere`}."""
        request = pb.DeleteTracesRequest(trace_ids=trace_ids or (), all=trace_ids is None)
        answers, unreachable = await ask_peers(self._membership, lambda peer: peer.client.delete_traces(request, ASK_S))
        here = self._store.delete(None if trace_ids is None else frozenset(trace_ids))
        return {"deleted": here + sum(count for _, count in answers), "unreachable": unreachable}

    # for peers

    def answer_read(self, request: pb.ReadTracesRequest) -> pb.ReadTracesReply:
        key_id = request.key_id if request.HasField("key_id") else None
        if request.id:
            found = self._store.find(request.id, key_id)
            traces = [] if found is None else [found]
        else:
            traces = [_without_laps(trace) for trace in self._store.all(key_id)]
        return pb.ReadTracesReply(traces=[trace_to_json(trace) for trace in traces])

    def answer_delete(self, request: pb.DeleteTracesRequest) -> pb.DeleteTracesReply:
        wanted = None if request.all else frozenset(request.trace_ids)
        return pb.DeleteTracesReply(count=self._store.delete(wanted))


def _without_laps(trace: RequestTrace) -> RequestTrace:
    legs = [replace(leg, frames=()) for leg in trace.legs]
    return replace(trace, legs=legs, tokens_s=[], num_tokens=trace.output_tokens)


async def _ask(peer: Peer, key_id: str | None, wanted: str) -> list[RequestTrace]:
    request = pb.ReadTracesRequest(key_id=key_id, id=wanted)
    reply = await peer.client.read_traces(request, ASK_S)
    traces = [trace_from_json(data) for data in reply.traces[:MAX_TRACES]]
    if any(key_id not in (None, trace.key_id) for trace in traces):
        raise TransportError("the answer has traces of another API key")
    return traces
