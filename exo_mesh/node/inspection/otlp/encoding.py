"""Encodes export requests of OTLP over HTTP, as JSON or protobuf.

JSON needs no further package; protobuf needs the extra `otel`, see exo_mesh.wire.otlp_messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from exo_mesh import __version__
from exo_mesh.node.inspection.otlp.spans import Span, Value, spans_of
from exo_mesh.rings.serving.traces import RequestTrace
from exo_mesh.wire import otlp_messages

JSON, PROTOBUF = "http/json", "http/protobuf"
"""The names of the encodings in OTEL_EXPORTER_OTLP_PROTOCOL."""

CONTENT_TYPES = {JSON: "application/json", PROTOBUF: "application/x-protobuf"}

_SAMPLED, _PARENT_KNOWN, _PARENT_REMOTE = 0x01, 0x100, 0x200
"""Flags of a span: sampled, parent's location known, parent in another program."""
_ERROR = 2
_SCOPE = {"name": "exo_mesh", "version": __version__}
SPANS_PER_BREATH = 4
"""Number of spans between two pauses; encoding them takes less than a millisecond."""


class PeerName(msgspec.Struct, frozen=True):
    """A peer that did part of the work. version: of exo-mesh; "" if unknown."""

    id: str
    name: str
    version: str = ""


class Origin(msgspec.Struct, frozen=True):
    """The origin of spans. entry: the peer that exports. peers: all peers of the mesh. attributes: extra resource
    attributes from the operator. address: (host, port) of the entry peer's API."""

    entry: PeerName
    peers: Sequence[PeerName] = ()
    service: str = "exo-mesh"
    attributes: Mapping[str, str] = msgspec.field(default_factory=dict)
    address: tuple[str, int] | None = None

    def peer(self, prefix: str) -> PeerName:
        """The peer whose id begins with the prefix; a peer that has left the mesh is named by the prefix only."""
        if not prefix or self.entry.id.startswith(prefix):
            return self.entry
        return next((peer for peer in self.peers if peer.id.startswith(prefix)), PeerName(prefix, prefix))


def encode(
    traces: Iterable[RequestTrace],
    origin: Origin,
    protocol: str,
    breathe: Callable[[], object] = lambda: None,
) -> bytes:
    """Encodes the body of an export request with all spans of these traces. Each peer is a separate resource.

    breathe: called every few spans, so that a caller in a thread can release the interpreter lock.
    """
    make = _json_span if protocol == JSON else _message_span
    of_peers: dict[PeerName, list[Any]] = {}
    for trace in traces:
        for number, span in enumerate(spans_of(trace, origin.address)):
            if number % SPANS_PER_BREATH == 0:
                breathe()
            of_peers.setdefault(origin.peer(span.peer), []).append(make(trace, span))
    groups = [(_resource(origin, peer), spans) for peer, spans in of_peers.items()]
    return _json_body(groups) if protocol == JSON else otlp_messages.request_body(groups, _SCOPE)


def refused_spans(reply: bytes, protocol: str) -> tuple[int, str]:
    """(number of spans that the collector rejected while it accepted the others, reason)."""
    if protocol == PROTOBUF:
        return otlp_messages.refused_spans(reply)
    try:
        found = json.loads(reply or b"{}").get("partialSuccess") or {}
        return int(found.get("rejectedSpans", 0)), str(found.get("errorMessage", ""))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return 0, ""  # some collectors answer with plain text


def _resource(origin: Origin, peer: PeerName) -> dict[str, Value]:
    of_peer = {"service.instance.id": peer.id, "exo_mesh.peer.name": peer.name}
    version = {"service.version": peer.version} if peer.version else {}
    return {"service.name": origin.service, **origin.attributes, **of_peer, **version}


def _flags(trace: RequestTrace, span: Span) -> int:
    is_remote = bool(trace.parent_span_id) and span.parent_id == trace.parent_span_id
    return _SAMPLED | _PARENT_KNOWN | (_PARENT_REMOTE if is_remote else 0)


def _nanos(seconds: float) -> int:
    """Converts Unix seconds to nanoseconds; the precision of a float is about 100 ns today, which is enough."""
    return int(seconds * 1e9)


# JSON: ids in hex, 64-bit numbers as strings


def _json_body(groups: Iterable[tuple[Mapping[str, Value], Sequence[msgspec.Raw]]]) -> bytes:
    document = [
        {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": _SCOPE, "spans": spans}]}
        for resource, spans in groups
    ]
    return msgspec.json.encode({"resourceSpans": document})


def _json_span(trace: RequestTrace, span: Span) -> msgspec.Raw:
    found: dict[str, Any] = {
        "traceId": trace.trace_id,
        "spanId": span.span_id,
        "flags": _flags(trace, span),
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(_nanos(span.at_s)),
        "endTimeUnixNano": str(_nanos(max(span.at_s, span.until_s))),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        found["parentSpanId"] = span.parent_id
    if trace.trace_state:
        found["traceState"] = trace.trace_state
    if span.events:
        found["events"] = [{"timeUnixNano": str(_nanos(at)), "name": name} for name, at in span.events]
    if span.error:
        found["status"] = {"code": _ERROR, "message": span.error}
    return msgspec.Raw(msgspec.json.encode(found))


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [_value(item) for item in value]}}


def _message_span(trace: RequestTrace, span: Span) -> Any:
    return otlp_messages.new_span(
        span.attributes,
        [(_nanos(at), name) for name, at in span.events],
        trace_id=bytes.fromhex(trace.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_id),
        trace_state=trace.trace_state,
        flags=_flags(trace, span),
        name=span.name,
        kind=span.kind,
        start_time_unix_nano=_nanos(span.at_s),
        end_time_unix_nano=_nanos(max(span.at_s, span.until_s)),
        status={"code": _ERROR, "message": span.error} if span.error else None,
    )
