"""Checks every call to a gRPC server before its answer sees it, and serves answers by the rows of calls.

A handler gets a message that was read by `read_message`. An unreadable message is answered with RESOURCE_EXHAUSTED or
INVALID_ARGUMENT; gRPC's own deserializer would answer UNKNOWN and print a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from exo_mesh.base.clock import Clock
from exo_mesh.base.printable import printable
from exo_mesh.errors import MeshError, OpenMeshError, TransportError
from exo_mesh.security.secret import DEFAULT_NAMESPACE, fingerprint
from exo_mesh.wire.call_access import PROOF_KEY, CallGuard, Rule, host_of_peer
from exo_mesh.wire.incoming import LARGE_BYTES, MAX_BYTES, MalformedError, OversizedError, read_message
from exo_mesh.wire.peer_call import AnyAnswer, CallAnswer, StreamAnswer, UploadAnswer
from exo_mesh.wire.unknown_fields import require_known

CODE_KEY = "exo-mesh-code"
"""Trailing metadata with the `code` of the MeshError that ended a call; its message is in the status details."""

NAMESPACE_KEY = "exo-mesh-namespace"
"""Metadata of every control call. A caller without this metadata belongs to the default namespace."""

MAX_LARGE_WAITING = 16
"""Most large messages that wait to be processed; the caller of a further one gets an error that asks for a retry."""

REPORT_EVERY_S = 60.0

_log = logging.getLogger(__name__)
_Continuation = Callable[[Any], Awaitable[Any]]


class Gate(grpc.aio.ServerInterceptor):
    """Checks calls before the servicers of one server.

    max_bytes(method, data): the longest message for this call. namespace: None admits callers of any namespace.
    on_stranger(method, caller, data, reason) is called for each call from another namespace; caller: gRPC's name for
    the peer. guard: decides who may make a call, by the rule of its path in `rules`.
    """

    def __init__(
        self,
        max_bytes: Callable[[str, bytes], int] = lambda method, data: MAX_BYTES,
        namespace: str | None = None,
        on_stranger: Callable[[str, str, bytes, str], None] = lambda method, caller, data, reason: None,
        now: Clock = time.monotonic,
        guard: CallGuard | None = None,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self._guard = guard or CallGuard()
        self._rules = rules or {}
        self._max_bytes = max_bytes
        self._namespace = namespace
        self._on_stranger = on_stranger
        self._now = now
        self._large = asyncio.Lock()
        self._num_large = 0
        self._handlers: dict[str, Any] = {}
        self._due = float("-inf")
        self._num_refused = 0

    async def intercept_service(self, continuation: _Continuation, handler_call_details: Any) -> Any:
        """gRPC's hook at the start of every call."""
        method = handler_call_details.method
        if (other := self._other_namespace(handler_call_details)) is not None:
            return self._denial(method, other)
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        if method not in self._handlers:
            self._handlers[method] = self._checking(method, handler)
        return self._handlers[method]

    def _other_namespace(self, details: Any) -> str | None:
        if self._namespace is None:
            return None
        said = str(dict(details.invocation_metadata or ()).get(NAMESPACE_KEY, DEFAULT_NAMESPACE))
        return None if said == self._namespace else said

    def _denial(self, method: str, other: str) -> Any:
        reason = f"namespace {fingerprint(other)} is not {fingerprint(self._namespace or '')}"

        async def deny(data: bytes, context: Any) -> None:
            self._on_stranger(method, context.peer(), data, reason)
            await self._refuse(method, context, grpc.StatusCode.PERMISSION_DENIED, reason)

        return grpc.unary_unary_rpc_method_handler(deny)

    def _checking(self, method: str, handler: Any) -> Any:
        cls = handler.request_deserializer.__self__

        async def one(data: bytes, context: Any) -> Any:
            await self._require_right(method, context)
            async with self._turn(method, data, context):
                return await handler.unary_unary(await self._read(cls, method, data, context), context)

        async def several(data: bytes, context: Any) -> None:
            await self._require_right(method, context)
            await handler.unary_stream(await self._read(cls, method, data, context), context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(several, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(one, None, handler.response_serializer)

    async def _require_right(self, method: str, context: Any) -> None:
        """Abort the call, before its message is read, if the caller may not make it."""
        if self._guard.obeys_all:
            return
        proof = str(dict(context.invocation_metadata() or ()).get(PROOF_KEY, ""))
        call, rule = method.rpartition("/")[2], self._rules[method]
        if reason := await self._guard.refusal(call, rule, host_of_peer(context.peer()), proof):
            denied = grpc.StatusCode.PERMISSION_DENIED
            await self._refuse(method, context, denied, reason, OpenMeshError.code)

    async def _read(self, cls: type[Message], method: str, data: bytes, context: Any) -> Message:
        try:
            return read_message(cls, data, self._max_bytes(method, data))
        except OversizedError as exc:
            await self._refuse(method, context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(exc))
        except MalformedError as exc:
            await self._refuse(method, context, grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        raise AssertionError("the call was aborted")

    @contextlib.asynccontextmanager
    async def _turn(self, method: str, data: bytes, context: Any) -> AsyncIterator[None]:
        """Processes large messages one at a time."""
        if len(data) <= LARGE_BYTES:
            yield
            return
        if self._num_large > MAX_LARGE_WAITING:
            reason = f"{self._num_large} large messages are already waiting; try again"
            await self._refuse(method, context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._num_large += 1
        try:
            async with self._large:
                yield
        finally:
            self._num_large -= 1

    async def _refuse(
        self, method: str, context: Any, code: grpc.StatusCode, reason: str, error: str = TransportError.code
    ) -> None:
        """Abort the call. Logs at most one line per minute, however many calls are refused."""
        self._num_refused += 1
        if self._now() >= self._due:
            caller, what = printable(context.peer(), 80), method.rpartition("/")[2]
            _log.warning("refused %d calls; the last one was %s from %s: %s", self._num_refused, what, caller, reason)
            self._due, self._num_refused = self._now() + REPORT_EVERY_S, 0
        await context.abort(code, reason, ((CODE_KEY, error),))


UNKNOWN = "unknown"
"""The name of a caller that gRPC cannot name: no name at all stands for this node itself, which may do more."""


def handlers_of(answers: Iterable[AnyAnswer]) -> tuple[grpc.GenericRpcHandler, ...]:
    """The handlers of one server. A MeshError ends a call with its code. Any other exception is a bug of exo-mesh,
    which gRPC logs and answers with UNKNOWN."""
    services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
    for answer in answers:
        services.setdefault(answer.row.service, {})[answer.row.name] = _handler(answer)
    return tuple(grpc.method_handlers_generic_handler(f"exo_mesh.{name}", one) for name, one in services.items())


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
