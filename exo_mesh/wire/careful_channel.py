"""A channel to a control endpoint: limits what its replies may be, and proves whose calls it makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from exo_mesh.errors import TransportError
from exo_mesh.wire.call_access import Access, OwnCalls, rule_of
from exo_mesh.wire.channel_options import MAX_MESSAGE_BYTES
from exo_mesh.wire.incoming import MAX_BYTES, STRANGER_BYTES, read_message

_REPLY_BYTES = {
    "Hello": STRANGER_BYTES,
    "ReadTextFiles": MAX_BYTES + 64 * 1024,  # a chunk of 1 MiB and its name
    "Diagnose": 4 * MAX_BYTES,
    "ReadTraces": MAX_MESSAGE_BYTES,
    "Capture": 4 * MAX_BYTES,
    "DescribeModel": 4 * MAX_BYTES,
    "DescribeFiles": 4 * MAX_BYTES,
    "FindStreams": MAX_MESSAGE_BYTES,  # with the tools of a request
    "SelfTest": MAX_MESSAGE_BYTES,  # samples of the outputs of up to eight layer ranges
}
"""Longest replies, if they differ from MAX_BYTES."""


class CarefulChannel:
    """A channel for stubs. It reads replies by `_reader`, with limits, and sends a proof with each call that needs
    one."""

    def __init__(self, channel: grpc.aio.Channel, own_calls: OwnCalls | None) -> None:
        self._channel = channel
        self._own_calls = own_calls

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **options: Any) -> Any:
        reader = _reader(path, response_deserializer)
        return self._proving(path, self._channel.unary_unary(path, request_serializer, reader, **options))

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **options: Any) -> Any:
        reader = _reader(path, response_deserializer)
        return self._proving(path, self._channel.unary_stream(path, request_serializer, reader, **options))

    def _proving(self, path: str, method: Any) -> Any:
        own_calls = self._own_calls
        if own_calls is None or rule_of(path).access is not Access.PEER:
            return method

        def call(request: Any, *, timeout: float | None, metadata: tuple[tuple[str, str], ...]) -> Any:
            return method(request, timeout=timeout, metadata=(*metadata, own_calls.metadata()))

        return call


class LazyStub:
    """The calls of a service on a channel, each one made when it is first used. A stub of gRPC makes all forty at once,
    which takes 50 kB for each address, and a node may know a thousand."""

    def __init__(self, kind: Callable[[Any], Any], channel: CarefulChannel) -> None:
        """kind: the class of the service's stub."""
        self._kind, self._channel = kind, channel

    def __getattr__(self, name: str) -> Any:
        try:
            form, path, options = _calls_of(self._kind)[name]
        except KeyError as exc:
            raise AttributeError(name) from exc
        method = getattr(self._channel, form)(path, **options)
        setattr(self, name, method)
        return method


class _Notes:
    """A channel that only notes with which arguments a stub makes its calls."""

    def unary_unary(self, path: str, **options: Any) -> Any:
        return "unary_unary", path, options

    def unary_stream(self, path: str, **options: Any) -> Any:
        return "unary_stream", path, options


@cache
def _calls_of(kind: Callable[[Any], Any]) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """(form, path, options) of each call of a service, by its name."""
    return dict(vars(kind(_Notes())))


def _reader(path: str, deserializer: Any) -> Callable[[bytes], Message | TransportError]:
    """A function that reads replies with limits. It returns an error instead of raising it: gRPC would log the error
    and return None."""
    cls = deserializer.__self__
    max_bytes = _REPLY_BYTES.get(path.rpartition("/")[2], MAX_BYTES)

    def read(data: bytes) -> Message | TransportError:
        try:
            message: Message = read_message(cls, data, max_bytes)
        except TransportError as exc:
            return exc
        return message

    return read
