"""An OpenTelemetry collector for tests: a real HTTP server that reads OTLP with the official message classes."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

_IDS = ("traceId", "spanId", "parentSpanId")


class Collector:
    """answers: (status, headers) of the next requests, instead of 200. rejects: spans to reject of each request."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.rejects = 0
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = ""

    async def traces(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.paths.append(request.path)
        if self.answers:
            status, headers = self.answers.pop(0)
            return web.Response(status=status, headers=headers)
        is_json = request.content_type == "application/json"
        self.requests.append(decoded(body, is_json=is_json))
        reply = ExportTraceServiceResponse()
        if self.rejects:
            reply.partial_success.rejected_spans = self.rejects
            reply.partial_success.error_message = "too many"
        data = json_format.MessageToJson(reply).encode() if is_json else reply.SerializeToString()
        return web.Response(body=data, content_type=request.content_type)

    def spans(self) -> list[tuple[dict[str, str], Span]]:
        """Every span that came, with the attributes of its resource."""
        return [
            (attributes_of(group.resource), span)
            for request in self.requests
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]


def decoded(body: bytes, *, is_json: bool) -> ExportTraceServiceRequest:
    """An export request. The JSON of OTLP is that of protobuf, but for the ids, which are in hex."""
    if not is_json:
        return ExportTraceServiceRequest.FromString(body)
    document = json.loads(body)
    for found in _objects(document):
        for key in _IDS:
            if key in found:
                found[key] = base64.b64encode(bytes.fromhex(found[key])).decode()
    return json_format.ParseDict(document, ExportTraceServiceRequest())


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(item)


def attributes_of(owner: Any) -> dict[str, Any]:
    """Of a span or resource, as plain values."""
    return {item.key: _plain(item.value) for item in owner.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)


@asynccontextmanager
async def collector(tls: ssl.SSLContext | None = None) -> AsyncIterator[Collector]:
    """Listening on a free port of the loopback."""
    found = Collector()
    app = web.Application()
    app.router.add_post("/{path:.*}", found.traces)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    host, port = runner.addresses[0][:2]
    found.url = f"http://{host}:{port}" if tls is None else f"https://localhost:{port}"
    try:
        yield found
    finally:
        await runner.cleanup()
