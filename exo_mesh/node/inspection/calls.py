"""The calls for troubleshooting: one row each, this node's answers, and what peers answer, as values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.base.printable import printable_values
from exo_mesh.domain.bounded_json import decode_bounded
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.port import Calls
from exo_mesh.node.inspection.trace_formats import trace_from_json, trace_to_json
from exo_mesh.rings.serving.traces import MAX_TRACES, RequestTrace, TraceStore
from exo_mesh.wire.call_access import ANYBODY, owner
from exo_mesh.wire.channel_options import MAX_MESSAGE_BYTES
from exo_mesh.wire.incoming import MAX_BYTES
from exo_mesh.wire.peer_call import PeerCall
from exo_mesh.wire.proto import control_pb2 as pb

ASK_S = 2.0

CAPTURE_S = 15.0
"""Deadline of a peer's capture: Apple's tools may take 8 s, and longer on a busy machine."""

MAX_DIAGNOSTICS_BYTES = 3 * 2**20
"""Largest diagnostics of a peer; 32 runners with 128 phases each need a third of it."""

MAX_CAPTURE_BYTES = 4 * 2**20 - 1024

_CURL = 'curl -X POST -H "Authorization: Bearer $(exo-mesh key local)" http://127.0.0.1:52415'

DIAGNOSE = PeerCall(
    "Diagnose", pb.DiagnoseRequest, pb.DiagnoseReply, ANYBODY, deadline_s=ASK_S, reply_bytes=4 * MAX_BYTES
)
READ_TRACES = PeerCall(
    "ReadTraces",
    pb.ReadTracesRequest,
    pb.ReadTracesReply,
    owner("curl http://127.0.0.1:52415/v1/traces"),
    deadline_s=ASK_S,
    reply_bytes=MAX_MESSAGE_BYTES,
)
DELETE_TRACES = PeerCall(
    "DeleteTraces", pb.DeleteTracesRequest, pb.DeleteTracesReply, owner(f"{_CURL}/v1/traces/delete"), deadline_s=ASK_S
)
CAPTURE = PeerCall(
    "Capture",
    pb.CaptureRequest,
    pb.CaptureReply,
    owner(f"{_CURL}/v1/diagnostics/node/capture"),
    deadline_s=CAPTURE_S,
    reply_bytes=4 * MAX_BYTES,
)


async def answer_diagnose(
    node: Callable[[], Awaitable[dict[str, Any]]], timeline: Callable[[], dict[str, Any]], request: pb.DiagnoseRequest
) -> pb.DiagnoseReply:
    """node, timeline: see Diagnostics."""
    found = timeline() if request.timeline else await node()
    return pb.DiagnoseReply(json=msgspec.json.encode(found))


async def diagnose(calls: Calls, peer_id: str, *, timeline: bool = False) -> dict[str, Any]:
    """The diagnostics of a node. timeline: only the phases of its runners."""
    reply = await calls.call(peer_id, DIAGNOSE, pb.DiagnoseRequest(timeline=timeline))
    found = _decoded(reply.json, MAX_DIAGNOSTICS_BYTES, "diagnostics", peer_id)
    if found is None:
        raise TransportError(f"the diagnostics of peer {peer_id[:8]} are empty")
    return found


async def answer_capture(
    here: Callable[[str], Awaitable[dict[str, Any] | None]], request: pb.CaptureRequest
) -> pb.CaptureReply:
    """The JSON is `null` if the runner does not run here. here: see Captures."""
    return pb.CaptureReply(json=msgspec.json.encode(await here(request.runner)))


async def capture(calls: Calls, peer_id: str, runner: str) -> dict[str, Any] | None:
    """Stacks and memory maps of a node and its runners, or of one runner; None if that does not run there."""
    reply = await calls.call(peer_id, CAPTURE, pb.CaptureRequest(runner=runner))
    return _decoded(reply.json, MAX_CAPTURE_BYTES, "capture", peer_id)


def _decoded(data: bytes, max_bytes: int, what: str, peer_id: str) -> dict[str, Any] | None:
    """What a node says of itself in JSON; None for `null`. Raises TransportError if it is anything else."""
    whose = f"the {what} of peer {peer_id[:8]}"
    if len(data) > max_bytes:
        raise TransportError(f"{whose}: {len(data)} bytes are more than {max_bytes}")
    try:
        found = printable_values(decode_bounded(data))
    except (msgspec.DecodeError, RecursionError) as exc:
        raise TransportError(f"{whose}: the answer is not valid JSON: {exc}") from exc
    if found is None:
        return None
    if not isinstance(found, dict) or found.get("node_id") != peer_id:
        raise TransportError(f"{whose}: the answer belongs to another node")
    return found


async def answer_read_traces(traces: TraceStore, request: pb.ReadTracesRequest) -> pb.ReadTracesReply:
    key_id = request.key_id if request.HasField("key_id") else None
    if request.id:
        found = traces.find(request.id, key_id)
        shown = [] if found is None else [found]
    else:
        shown = [_without_laps(trace) for trace in traces.all(key_id)]
    return pb.ReadTracesReply(traces=[trace_to_json(trace) for trace in shown])


def _without_laps(trace: RequestTrace) -> RequestTrace:
    legs = [replace(leg, frames=()) for leg in trace.legs]
    return replace(trace, legs=legs, tokens_s=[], num_tokens=trace.output_tokens)


async def read_traces(calls: Calls, peer_id: str, key_id: str | None, wanted: str = "") -> list[RequestTrace]:
    """Traced requests that entered at a node, or the one that is wanted. key_id: only with this API key, "" for no key,
    None for all."""
    reply = await calls.call(peer_id, READ_TRACES, pb.ReadTracesRequest(key_id=key_id, id=wanted))
    found = [trace_from_json(data) for data in reply.traces[:MAX_TRACES]]
    if any(key_id not in (None, trace.key_id) for trace in found):
        raise TransportError("the answer has traces of another API key")
    return found


async def answer_delete_traces(traces: TraceStore, request: pb.DeleteTracesRequest) -> pb.DeleteTracesReply:
    wanted = None if request.all else frozenset(request.trace_ids)
    return pb.DeleteTracesReply(count=traces.delete(wanted))


async def delete_traces(calls: Calls, peer_id: str, trace_ids: Sequence[str] | None) -> int:
    """Delete traces that a node keeps, None: all of them. Returns their number."""
    request = pb.DeleteTracesRequest(trace_ids=trace_ids or (), all=trace_ids is None)
    return (await calls.call(peer_id, DELETE_TRACES, request)).count
