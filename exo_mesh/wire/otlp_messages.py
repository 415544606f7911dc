"""Encodes export requests of OTLP with the official message classes, which the extra `otel` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

_MESSAGES = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"

Attributes: TypeAlias = Mapping[str, Any]
"""By name: a text, a number, or a sequence of them."""


def are_installed() -> bool:
    """Whether the message classes are installed."""
    try:
        return importlib.util.find_spec(_MESSAGES) is not None
    except ModuleNotFoundError:
        return False


def request_body(groups: Iterable[tuple[Attributes, Sequence[Any]]], scope: Mapping[str, str]) -> bytes:
    """Encodes a request. groups: the attributes of each resource, and its spans from `new_span`."""
    request = _messages().ExportTraceServiceRequest()
    for resource, spans in groups:
        group = request.resource_spans.add()
        _fill(group.resource.attributes, resource)
        group.scope_spans.add(scope=scope, spans=spans)
    encoded: bytes = request.SerializeToString()
    return encoded


def new_span(attributes: Attributes, events: Iterable[tuple[int, str]], **fields: Any) -> Any:
    """A span. events: (Unix nanoseconds, name). fields: of the message."""
    from opentelemetry.proto.trace.v1 import trace_pb2

    span = trace_pb2.Span(**fields)
    _fill(span.attributes, attributes)
    for at, name in events:
        span.events.add(name=name, time_unix_nano=at)
    return span


def refused_spans(reply: bytes) -> tuple[int, str]:
    """(number of spans that the collector rejected, reason)."""
    try:
        partial = _messages().ExportTraceServiceResponse.FromString(reply).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, partial.error_message


def _messages() -> Any:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    return trace_service_pb2


def _fill(attributes: Any, values: Attributes) -> None:
    for key, value in values.items():
        _set(attributes.add(key=key).value, value)


def _set(message: Any, value: Any) -> None:
    if isinstance(value, str):
        message.string_value = value
    elif isinstance(value, int):
        message.int_value = value
    elif isinstance(value, float):
        message.double_value = value
    else:
        array = message.array_value.values
        for item in value:
            _set(array.add(), item)
