"""The port through which a node calls other nodes. The membership knows this protocol and no network library.

The membership keeps a client for each peer, replaces the client when another address works better, and closes it when
the peer is gone. All packages make their calls to the peer through it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import cached_property
from typing import Protocol

from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import InputError, MeshError, TransportError
from exo_mesh.wire.peer_call import AnyAnswer, AnyRow, CallAnswer, PeerCall, PeerStream, Q, R, StreamAnswer
from exo_mesh.wire.probes.asking import DatagramProbes


class ControlPort(Protocol):
    """The control endpoint of one peer, at one address.

    A new client does no I/O before its first call. It connects and reconnects by itself.

    Every call fails with a MeshError and nothing else:
    - TransportError: the peer cannot be reached, or the connection was closed during the call.
    - StrangerError, a kind of TransportError: the two nodes have different mesh secrets, if that can be determined.
    - DeadlineError: no answer before the deadline, which includes the time to connect.
    - any other MeshError: the peer's own refusal.
    Cancelling the task of the caller ends the call and raises CancelledError.
    """

    address: str
    """ "host:port"."""

    def at(self, address: str) -> ControlPort:
        """A new client with the same credentials and another address. The caller of `at` closes it."""

    @property
    def is_idle(self) -> bool:
        """True while no call and no stream is running."""

    @property
    def datagrams(self) -> DatagramProbes | None:
        """Probes of the peer by datagrams; None if all are calls."""

    async def close(self) -> None:
        """Close the connection. Running calls may fail with TransportError. May be called again."""

    async def close_when_idle(self) -> None:
        """Close the connection after the last stream that outlives a verdict has ended, without ending any."""

    async def connects(self, timeout_s: float) -> bool:
        """Whether a process of this mesh accepts connections at the address. Calls nothing and raises no MeshError."""

    async def is_refused(self, timeout_s: float) -> bool:
        """Whether the machine refuses connections at the address, so that no process listens there. False if nothing
        answers; raises no MeshError."""

    async def call(self, row: PeerCall[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Make a call. timeout_s: the deadline of the row, if None."""

    def stream(self, row: PeerStream[Q, R], request: Q, *, quiet: bool = False) -> AsyncGenerator[R, None]:
        """The messages of a stream. quiet: over a connection with so few pings that half a minute may pass before its
        loss is noticed. The client is not idle meanwhile."""


class Calls:
    """Makes calls by their rows, to a peer over the wire and to this node by its own answers.

    own_id: of this node. client_of: returns the client of a peer, None if it is gone. answers: returns the answers of
    this node; called once, after its start.

    A call to this node has no deadline and no limit of size, since its answer has those of its own work.
    """

    def __init__(
        self,
        own_id: str,
        client_of: Callable[[str], ControlPort | None],
        answers: Callable[[], Iterable[AnyAnswer]],
    ) -> None:
        self.own_id = own_id
        self._client_of = client_of
        self._answers = answers

    async def call(self, peer_id: str, row: PeerCall[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Make a call to this node or a peer. timeout_s: the deadline of the row, if None. Raises TransportError if the
        peer is gone, and other MeshErrors; see ControlPort."""
        if peer_id == self.own_id:
            answer = self._own[row]
            assert isinstance(answer, CallAnswer)
            reply: R = await answer.function(request, "")
            return reply
        return await self._client(peer_id).call(row, request, timeout_s)

    async def stream(
        self, peer_id: str, row: PeerStream[Q, R], request: Q, *, quiet: bool = False
    ) -> AsyncGenerator[R, None]:
        """The messages of a stream from this node or a peer; raises as `call`. quiet: see ControlPort.stream."""
        if peer_id == self.own_id:
            answer = self._own[row]
            assert isinstance(answer, StreamAnswer)
            items: AsyncGenerator[R, None] = answer.function(request)
        else:
            items = self._client(peer_id).stream(row, request, quiet=quiet)
        async with aclosing(items):
            async for item in items:
                yield item

    def _client(self, peer_id: str) -> ControlPort:
        client = self._client_of(peer_id)
        if client is None:
            raise TransportError(f"peer {peer_id[:8]} is gone")
        return client

    @cached_property
    def _own(self) -> dict[AnyRow, AnyAnswer]:
        return {answer.row: answer for answer in self._answers()}


def require_own(own: PeerInfo, node_id: str) -> None:
    """Raises InputError if a request that names its node arrived at another one."""
    if node_id != own.id:
        raise InputError(f"this request is for node {node_id[:8]}, but arrived at another one")


def raise_bugs(outcomes: Iterable[object]) -> None:
    """Raises the first exception among the outcomes of calls that is no MeshError: this node's own answer has a bug."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, MeshError):
            raise outcome
