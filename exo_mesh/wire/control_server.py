"""Serves the control endpoint of a node: grpc.aio in front of the answers of all packages to the calls of peers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

import grpc
import grpc.aio

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.errors import TransportError
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.security.secret import DEFAULT_NAMESPACE
from exo_mesh.wire.call_access import CallGuard, host_of_peer
from exo_mesh.wire.calls import PROBE_PATH, path_answer
from exo_mesh.wire.channel_options import CONTROL_SERVER, bracketed
from exo_mesh.wire.channels import Option, bind, new_server
from exo_mesh.wire.gate import Gate, handlers_of
from exo_mesh.wire.handshake_counter import HandshakeCounter
from exo_mesh.wire.incoming import STRANGER_BYTES, first_text, read_message
from exo_mesh.wire.peer_call import AnyAnswer
from exo_mesh.wire.proto import control_pb2 as pb

_HELLO = "/exo_mesh.Control/Hello"

NUM_PORTS = 65_536
"""gRPC takes a higher port modulo this number, so that 65536 would mean any free port."""

_log = logging.getLogger(__name__)


class ControlServer:
    """Serves answers to calls on host:port, or on the next free port within `tries`; port 0 means any free port.

    It also answers path probes with peer_id. is_peer(id): a living peer may send longer messages than a stranger.
    guard: decides who may make a call; by default everybody may. options: gRPC's, besides CONTROL_SERVER.
    on_stranger(who, reason, id) is called when a node of another namespace says hello.
    """

    def __init__(
        self,
        answers: Sequence[AnyAnswer],
        credentials: CredentialSource | None = None,
        *,
        peer_id: str = "",
        namespace: str = DEFAULT_NAMESPACE,
        is_peer: Callable[[str], bool] = lambda peer_id: True,
        on_stranger: Callable[[str, str, str], None] = lambda who, reason, peer_id: None,
        guard: CallGuard | None = None,
        options: Sequence[Option] = (),
    ) -> None:
        self._is_peer = is_peer
        self._on_stranger = on_stranger
        self._handlers = handlers_of([*answers, path_answer(peer_id)])
        rows = [PROBE_PATH, *(answer.row for answer in answers)]
        rules = {row.path: row.access for row in rows}
        self._peer_bytes = {row.path: row.peer_bytes for row in rows}
        self._gate = Gate(self._max_bytes, namespace, self._note_stranger, guard=guard, rules=rules)
        self._options = [*CONTROL_SERVER, *options]
        self._credentials = credentials
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
            server.add_generic_rpc_handlers(self._handlers)
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
        most = self._peer_bytes.get(method, STRANGER_BYTES)
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
