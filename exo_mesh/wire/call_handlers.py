"""What gRPC needs to serve answers to calls, and to make calls, from their rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from exo_mesh.errors import MeshError, OpenMeshError
from exo_mesh.wire.gate import CODE_KEY
from exo_mesh.wire.peer_call import AnyAnswer, AnyRow, CallAnswer, PeerCall, PeerStream, StreamAnswer, UploadAnswer
from exo_mesh.wire.unknown_fields import require_known

UNKNOWN = "unknown"
"""The name of a caller that gRPC cannot name: no name at all stands for this node itself, which may do more."""


def handlers_of(answers: Iterable[AnyAnswer]) -> tuple[grpc.GenericRpcHandler, ...]:
    """The handlers of one server. A MeshError ends a call with its code. Any other exception is a bug of exo-mesh,
    which gRPC logs and answers with UNKNOWN."""
    services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
    for answer in answers:
        services.setdefault(answer.row.service, {})[answer.row.name] = _handler(answer)
    return tuple(grpc.method_handlers_generic_handler(f"exo_mesh.{name}", one) for name, one in services.items())


def method_of(channel: grpc.aio.Channel, row: AnyRow, read: Any = None) -> Any:
    """The call over a channel, as gRPC makes it. read: reads a reply; by default without limits."""
    if isinstance(row, PeerCall):
        make: Any = channel.unary_unary
    else:
        make = channel.unary_stream if isinstance(row, PeerStream) else channel.stream_unary
    return make(row.path, row.request.SerializeToString, read or row.reply.FromString)


def _handler(answer: AnyAnswer) -> grpc.RpcMethodHandler[Any, Any]:
    row = answer.row
    if isinstance(answer, CallAnswer):
        return grpc.unary_unary_rpc_method_handler(_one(answer), row.request.FromString, row.reply.SerializeToString)
    if isinstance(answer, StreamAnswer):
        handle = _several(answer)
        return grpc.unary_stream_rpc_method_handler(handle, row.request.FromString, row.reply.SerializeToString)
    return grpc.stream_unary_rpc_method_handler(_upload(answer), row.request.FromString, row.reply.SerializeToString)


def _one(answer: CallAnswer[Any, Any]) -> Any:
    function, takes_unknown = answer.function, answer.row.takes_unknown

    async def handle(request: Message, context: Any) -> Any:
        try:
            if not takes_unknown:
                require_known(request)
            return await function(request, context.peer() or UNKNOWN)
        except MeshError as exc:
            await _abort(context, exc)

    return handle


def _several(answer: StreamAnswer[Any, Any]) -> Any:
    function, takes_unknown = answer.function, answer.row.takes_unknown

    async def handle(request: Message, context: Any) -> None:
        """A coroutine that writes: a generator around another one would cost time for every token."""
        try:
            if not takes_unknown:
                require_known(request)
            async with aclosing(function(request)) as items:
                async for item in items:
                    await context.write(item)
        except MeshError as exc:
            await _abort(context, exc)

    return handle


def _upload(answer: UploadAnswer[Any, Any]) -> Any:
    async def handle(requests: AsyncIterator[Message], context: Any) -> Any:
        try:
            return await answer.function(requests)
        except MeshError as exc:
            await _abort(context, exc)

    return handle


async def _abort(context: Any, exc: MeshError) -> None:
    is_denied = isinstance(exc, OpenMeshError)
    status = grpc.StatusCode.PERMISSION_DENIED if is_denied else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(status, str(exc), ((CODE_KEY, exc.code),))
