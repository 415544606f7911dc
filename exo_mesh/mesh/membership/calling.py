"""Calls any node of the mesh by its id: a peer over the wire, this node by its own answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import cached_property

from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import InputError, MeshError, TransportError
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.mesh.membership.roster import Roster
from exo_mesh.wire.peer_call import AnyAnswer, AnyRow, CallAnswer, PeerCall, PeerStream, Q, R, StreamAnswer


class Calls:
    """Makes calls by their rows. answers: returns the answers of this node; called once, after its start.

    A call to this node has no deadline and no limit of size, since its answer has those of its own work.
    """

    def __init__(self, roster: Roster, answers: Callable[[], Iterable[AnyAnswer]]) -> None:
        self._roster = roster
        self._answers = answers

    @property
    def own_id(self) -> str:
        return self._roster.own.id

    async def call(self, peer_id: str, row: PeerCall[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Make a call to this node or a peer. timeout_s: the deadline of the row, if None. Raises TransportError if the
        peer is gone, and other MeshErrors; see ControlPort."""
        if peer_id == self._roster.own.id:
            answer = self._own[row]
            assert isinstance(answer, CallAnswer)
            reply: R = await answer.function(request, "")
            return reply
        return await self._client(peer_id).call(row, request, timeout_s)

    async def stream(
        self, peer_id: str, row: PeerStream[Q, R], request: Q, *, quiet: bool = False
    ) -> AsyncGenerator[R, None]:
        """The messages of a stream from this node or a peer; raises as `call`. quiet: see ControlPort.stream."""
        if peer_id == self._roster.own.id:
            answer = self._own[row]
            assert isinstance(answer, StreamAnswer)
            items: AsyncGenerator[R, None] = answer.function(request)
        else:
            items = self._client(peer_id).stream(row, request, quiet=quiet)
        async with aclosing(items):
            async for item in items:
                yield item

    def _client(self, peer_id: str) -> ControlPort:
        peer = self._roster.peers.get(peer_id)
        if peer is None:
            raise TransportError(f"peer {peer_id[:8]} is gone")
        return peer.client

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
