"""Export requests in the two encodings of OTLP over HTTP.

JSON needs nothing installed; protobuf needs the official message classes, which the extra `otel` brings.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from exo_mesh import __version__
from exo_mesh.inspection.otlp.spans import Span, Value, spans_of
from exo_mesh.serving.traces import RequestTrace

JSON, PROTOBUF = "http/json", "http/protobuf"
"""As OTEL_EXPORTER_OTLP_PROTOCOL names them."""

CONTENT_TYPES = {JSON: "application/json", PROTOBUF: "application/x-protobuf"}

_SAMPLED, _PARENT_KNOWN, _PARENT_REMOTE = 0x01, 0x100, 0x200
"""Flags of a span: sampled, and whether its parent is in another program."""
_ERROR = 2
_MESSAGES = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"


@dataclass(frozen=True, slots=True)
class PeerName:
    """Of a peer that did some of the work. version: of exo-mesh; empty if it is not known any more."""

    id: str
    name: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose spans these are. entry: the peer that exports. peers: all peers of the mesh. attributes: of the operator,
    for each of them. address: of the entry peer's API."""

    entry: PeerName
    peers: Sequence[PeerName] = ()
    service: str = "exo-mesh"
    attributes: Mapping[str, str] = field(default_factory=dict)
    address: tuple[str, int] | None = None

    def peer(self, prefix: str) -> PeerName:
        """The peer whose id begins so; one that has left the mesh is known by these digits only."""
        if not prefix or self.entry.id.startswith(prefix):
            return self.entry
        return next((peer for peer in self.peers if peer.id.startswith(prefix)), PeerName(prefix, prefix))


def has_messages() -> bool:
    """Whether the message classes of the protobuf encoding are installed."""
    try:
        return importlib.util.find_spec(_MESSAGES) is not None
    except ModuleNotFoundError:
        return False


def encode(traces: Iterable[RequestTrace], origin: Origin, protocol: str) -> bytes:
    """The body of an export request with all spans of these traces."""
    document = _document(traces, origin)
    if protocol == JSON:
        return json.dumps(document, separators=(",", ":")).encode()
    for group in document["resourceSpans"]:
        for span in group["scopeSpans"][0]["spans"]:
            _ids_to_base64(span)
    from google.protobuf import json_format

    encoded: bytes = json_format.ParseDict(document, _messages().ExportTraceServiceRequest()).SerializeToString()
    return encoded


def refused_spans(reply: bytes, protocol: str) -> tuple[int, str]:
    """How many spans of a request the collector refused though it accepted the others, and why."""
    if protocol == JSON:
        try:
            found = json.loads(reply or b"{}").get("partialSuccess") or {}
            return int(found.get("rejectedSpans", 0)), str(found.get("errorMessage", ""))
        except (ValueError, AttributeError, TypeError, RecursionError):
            return 0, ""  # some collectors answer with a word
    from google.protobuf.message import DecodeError

    try:
        partial = _messages().ExportTraceServiceResponse.FromString(reply).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, partial.error_message


def _messages() -> Any:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    return trace_service_pb2


def _document(traces: Iterable[RequestTrace], origin: Origin) -> dict[str, Any]:
    """In the JSON form of OTLP: ids in hex, 64-bit numbers as texts. Each peer is a resource of its own."""
    of_peers: dict[PeerName, list[dict[str, Any]]] = {}
    for trace in traces:
        for span in spans_of(trace, origin.address):
            of_peers.setdefault(origin.peer(span.peer), []).append(_span(trace, span))
    scope = {"name": "exo_mesh", "version": __version__}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(_resource(origin, peer))},
                "scopeSpans": [{"scope": scope, "spans": spans}],
            }
            for peer, spans in of_peers.items()
        ]
    }


def _resource(origin: Origin, peer: PeerName) -> dict[str, Value]:
    of_peer = {"service.instance.id": peer.id, "exo_mesh.peer.name": peer.name}
    version = {"service.version": peer.version} if peer.version else {}
    return {"service.name": origin.service, **origin.attributes, **of_peer, **version}


def _span(trace: RequestTrace, span: Span) -> dict[str, Any]:
    is_remote = bool(trace.parent_span_id) and span.parent_id == trace.parent_span_id
    found: dict[str, Any] = {
        "traceId": trace.trace_id,
        "spanId": span.span_id,
        "flags": _SAMPLED | _PARENT_KNOWN | (_PARENT_REMOTE if is_remote else 0),
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": _nanos(span.at_s),
        "endTimeUnixNano": _nanos(max(span.at_s, span.until_s)),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        found["parentSpanId"] = span.parent_id
    if trace.trace_state:
        found["traceState"] = trace.trace_state
    if span.events:
        found["events"] = [{"timeUnixNano": _nanos(at), "name": name} for name, at in span.events]
    if span.error:
        found["status"] = {"code": _ERROR, "message": span.error}
    return found


def _nanos(seconds: float) -> str:
    """A float has some 100 ns of precision now, which is enough."""
    return str(int(seconds * 1e9))


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


def _ids_to_base64(span: dict[str, Any]) -> None:
    """As the JSON form of protobuf has bytes."""
    for key in ("traceId", "spanId", "parentSpanId"):
        if key in span:
            span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
