"""The server of a runner, at the first free port of a range."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc
import msgspec

from exo_mesh.errors import TransportError
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.wire.channel_options import bracketed
from exo_mesh.wire.channels import bind, new_server
from exo_mesh.wire.gate import Gate, handlers_of
from exo_mesh.wire.peer_call import AnyAnswer
from exo_mesh.wire.ring_receiver import RingReceiver


class Binding(msgspec.Struct, frozen=True):
    """An address to bind: `host`, and any free port (0, 0) or the first free port of a range."""

    host: str
    port_first: int
    port_last: int


class DataServer:
    """Answers the calls of entry peers, and takes frames if there is a receiver. Made and used on the event loop."""

    def __init__(
        self,
        max_bytes: Callable[[str, bytes], int],
        answers: Iterable[AnyAnswer],
        receiver: RingReceiver | None = None,
    ) -> None:
        """max_bytes: see Gate."""
        self._server = new_server([Gate(max_bytes)])
        receiving = () if receiver is None else (receiver.handler(),)
        self._server.add_generic_rpc_handlers((*receiving, *handlers_of(answers)))

    async def listen(self, binding: Binding, credentials: CredentialSource | None) -> int:
        """Start; returns the port. Raises TransportError if no port of the range is free."""
        port = _bind(self._server, binding, credentials)
        await self._server.start()
        return port

    async def close(self) -> None:
        await self._server.stop(grace=0.2)


def _bind(server: grpc.aio.Server, binding: Binding, credentials: CredentialSource | None) -> int:
    for port in range(binding.port_first, binding.port_last + 1):
        try:
            bound = bind(server, f"{bracketed(binding.host)}:{port}", credentials)
        except RuntimeError:
            continue
        if bound:
            return bound
    raise TransportError(f"no free data port on {binding.host} in {binding.port_first}-{binding.port_last}")
