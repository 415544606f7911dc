"""Serves the control endpoint of a node: grpc.aio in front of a handler for the messages of control.proto."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.errors import MeshError, OpenMeshError, TransportError
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.security.namespace import DEFAULT_NAMESPACE
from exo_mesh.wire.call_access import CALLS, CallGuard
from exo_mesh.wire.channel_options import CONTROL_SERVER, bracketed
from exo_mesh.wire.channels import Option, bind, new_server
from exo_mesh.wire.gate import CODE_KEY, Gate, host_of_peer
from exo_mesh.wire.handshake_counter import HandshakeCounter
from exo_mesh.wire.incoming import MAX_BYTES, STRANGER_BYTES, first_text, read_message
from exo_mesh.wire.path_probe import PathProbeServicer
from exo_mesh.wire.peer_call import Answer, AnyAnswer, StreamAnswer
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import control_pb2_grpc as rpc
from exo_mesh.wire.proto import paths_pb2_grpc as paths_rpc
from exo_mesh.wire.unknown_fields import require_known

_FROM_PEERS = ("/exo_mesh.Control/Probe", "/exo_mesh.Control/Exchange")
"""Calls whose first field is the caller's id and which carry records; the messages of all other calls are short."""

_HELLO = "/exo_mesh.Control/Hello"

_NEWS = (
    pb.HelloRequest,
    pb.ProbeRequest,
    pb.IndirectProbeRequest,
    pb.ExchangeRequest,
    pb.GoodbyeRequest,
    pb.ShareKeysRequest,
)
"""Requests that carry news. Unknown fields in them are ignored; in all other requests they are refused."""

NUM_PORTS = 65_536
"""gRPC takes a higher port modulo this number, so that 65536 would mean any free port."""

_log = logging.getLogger(__name__)


class ControlHandler(Protocol):
    """The calls that a node answers for other nodes. A MeshError raised by a method reaches the caller as the same
    error."""

    async def hello(self, request: pb.HelloRequest, caller_host: str) -> pb.HelloReply: ...
    async def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply: ...
    async def indirect_probe(self, request: pb.IndirectProbeRequest) -> pb.IndirectProbeReply: ...
    async def exchange(self, request: pb.ExchangeRequest) -> pb.ExchangeReply: ...
    async def goodbye(self, request: pb.GoodbyeRequest) -> pb.GoodbyeReply: ...
    async def stop_node(self, request: pb.StopNodeRequest) -> pb.StopNodeReply: ...
    async def wake(self, request: pb.WakeRequest) -> pb.WakeReply: ...
    async def share_keys(self, request: pb.ShareKeysRequest) -> pb.ShareKeysReply: ...
    async def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply: ...


class ControlServer:
    """Serves a handler on host:port, or on the next free port within `tries`; port 0 means any free port.

    It also answers path probes with peer_id. is_peer(id): a living peer may send longer messages than a stranger.
    guard: decides who may make a call; by default everybody may. options: gRPC's, besides CONTROL_SERVER.
    on_stranger(who, reason, id) is called when a node of another namespace says hello.
    """

    def __init__(
        self,
        answers: Sequence[AnyAnswer],
        credentials: CredentialSource | None = None,
        *,
        handler: ControlHandler | None = None,
        peer_id: str = "",
        namespace: str = DEFAULT_NAMESPACE,
        is_peer: Callable[[str], bool] = lambda peer_id: True,
        on_stranger: Callable[[str, str, str], None] = lambda who, reason, peer_id: None,
        guard: CallGuard | None = None,
        options: Sequence[Option] = (),
    ) -> None:
        self._is_peer = is_peer
        self._on_stranger = on_stranger
        rows = [answer.row for answer in answers]
        rules = {f"/exo_mesh.{call}": rule for call, rule in CALLS.items()} | {row.path: row.access for row in rows}
        self._peer_bytes = {row.path: row.peer_bytes for row in rows}
        self._gate = Gate(self._max_bytes, namespace, self._note_stranger, guard=guard, rules=rules)
        self._answers = answers
        self._handler = handler
        self._options = [*CONTROL_SERVER, *options]
        self._credentials = credentials
        self._peer_id = peer_id
        self._server: grpc.aio.Server | None = None
        self._handshakes = HandshakeCounter()
        self._tasks = TaskOwner()
        self.port = 0

    async def start(self, host: str, port: int, tries: int = 50) -> int:
        """Bind and serve. Returns the port. Raises TransportError if every port tried is taken."""
        last = min(port + (tries if port else 1), NUM_PORTS) - 1
        for candidate in range(port, last + 1):
            interceptors = [self._handshakes, self._gate] if self._credentials else [self._gate]
            server = new_server(interceptors, self._options)
            server.add_generic_rpc_handlers(handlers_of(self._answers))
            if self._handler is not None:
                server.add_generic_rpc_handlers((_old_handlers(_Servicer(self._handler)),))
            paths_rpc.add_PathsServicer_to_server(PathProbeServicer(self._peer_id), server)  # type: ignore[no-untyped-call]
            try:
                self.port = bind(server, f"{bracketed(host)}:{candidate}", self._credentials, self._handshakes.knock)
            except RuntimeError:  # grpc raises this for "address in use"
                continue
            await server.start()
            self._server = server
            if self._credentials is not None:
                self._tasks.keep(self._handshakes.watch, "handshake counter")
            return self.port
        raise TransportError(f"no free port for the control endpoint on {host} from {port} to {last}")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    def _max_bytes(self, method: str, data: bytes) -> int:
        most = MAX_BYTES if method in _FROM_PEERS else self._peer_bytes.get(method, STRANGER_BYTES)
        return most if most > STRANGER_BYTES and self._is_peer(first_text(data)) else STRANGER_BYTES

    def _note_stranger(self, method: str, caller: str, data: bytes, reason: str) -> None:
        """Report a call from another namespace, if it is a hello: only a hello identifies its caller."""
        if method != _HELLO:
            return
        with contextlib.suppress(TransportError):
            peer = read_message(pb.HelloRequest, data, STRANGER_BYTES).peer
            self._on_stranger(f"{peer.name[:256]} at {host_of_peer(caller)}", reason, peer.id[:64])

    async def stop(self, grace_s: float = 0.2) -> None:
        """Refuse new calls, and end running ones after the grace period."""
        await self._tasks.close()
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None


class _Servicer(rpc.ControlServicer):
    """Translates MeshErrors to gRPC statuses. Any other exception is a bug of exo-mesh, which grpc logs and answers
    with UNKNOWN."""

    def __init__(self, handler: ControlHandler) -> None:
        self._handler = handler

    async def Hello(self, request: pb.HelloRequest, context: Any) -> Any:
        return await _answer(context, lambda r: self._handler.hello(r, host_of_peer(context.peer())), request)

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> Any:
        return await _answer(context, self._handler.probe, request)

    async def IndirectProbe(self, request: pb.IndirectProbeRequest, context: Any) -> Any:
        return await _answer(context, self._handler.indirect_probe, request)

    async def Exchange(self, request: pb.ExchangeRequest, context: Any) -> Any:
        return await _answer(context, self._handler.exchange, request)

    async def Goodbye(self, request: pb.GoodbyeRequest, context: Any) -> Any:
        return await _answer(context, self._handler.goodbye, request)

    async def StopNode(self, request: pb.StopNodeRequest, context: Any) -> Any:
        return await _answer(context, self._handler.stop_node, request)

    async def Wake(self, request: pb.WakeRequest, context: Any) -> Any:
        return await _answer(context, self._handler.wake, request)

    async def ShareKeys(self, request: pb.ShareKeysRequest, context: Any) -> Any:
        return await _answer(context, self._handler.share_keys, request)

    async def Confirm(self, request: pb.ConfirmRequest, context: Any) -> Any:
        return await _answer(context, self._handler.confirm, request)


def _old_handlers(servicer: _Servicer) -> grpc.GenericRpcHandler:
    """The calls that no row serves yet."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in pb.DESCRIPTOR.services_by_name["Control"].methods:
        if method.name in vars(_Servicer):
            is_stream = method.server_streaming
            make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
            request, reply = getattr(pb, method.input_type.name), getattr(pb, method.output_type.name)
            handlers[method.name] = make(getattr(servicer, method.name), request.FromString, reply.SerializeToString)
    return grpc.method_handlers_generic_handler("exo_mesh.Control", handlers)


def handlers_of(answers: Iterable[AnyAnswer]) -> tuple[grpc.GenericRpcHandler, ...]:
    """What gRPC needs to serve these answers. A MeshError ends a call with its code. Any other exception is a bug of
    exo-mesh, which gRPC logs and answers with UNKNOWN."""
    services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
    for answer in answers:
        row = answer.row
        if isinstance(answer, Answer):
            handler = grpc.unary_unary_rpc_method_handler(
                _one(answer), row.request.FromString, row.reply.SerializeToString
            )
        else:
            handler = grpc.unary_stream_rpc_method_handler(
                _several(answer), row.request.FromString, row.reply.SerializeToString
            )
        services.setdefault(row.service, {})[row.name] = handler
    return tuple(
        grpc.method_handlers_generic_handler(f"exo_mesh.{service}", handlers) for service, handlers in services.items()
    )


def _one(answer: Answer[Any, Any]) -> Any:
    function, is_news = answer.function, answer.row.is_news

    async def handle(request: Message, context: Any) -> Any:
        try:
            if not is_news:
                require_known(request)
            return await function(request, context.peer())
        except MeshError as exc:
            await _abort(context, exc)

    return handle


def _several(answer: StreamAnswer[Any, Any]) -> Any:
    async def handle(request: Message, context: Any) -> AsyncIterator[Any]:
        try:
            require_known(request)
            async for item in answer.function(request):
                yield item
        except MeshError as exc:
            await _abort(context, exc)

    return handle


async def _answer(context: Any, method: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    try:
        if not isinstance(request, _NEWS):
            require_known(request)
        return await method(request)
    except MeshError as exc:
        await _abort(context, exc)


async def _stream(context: Any, method: Callable[[Any], AsyncIterator[Any]], request: Message) -> AsyncIterator[Any]:
    try:
        require_known(request)
        async for item in method(request):
            yield item
    except MeshError as exc:
        await _abort(context, exc)


async def _abort(context: Any, exc: MeshError) -> None:
    is_denied = isinstance(exc, OpenMeshError)
    status = grpc.StatusCode.PERMISSION_DENIED if is_denied else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(status, str(exc), ((CODE_KEY, exc.code),))
