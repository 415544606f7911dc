"""Admits peers to the mesh, and lets this node return after the others have declared it dead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import MeshError, StrangerError, TransportError
from exo_mesh.mesh.membership.calls import hello
from exo_mesh.mesh.membership.exchange import Exchange
from exo_mesh.mesh.membership.messages import HelloReply, HelloRequest, PeerUpdate
from exo_mesh.mesh.membership.peers import ITSELF, Peer, addresses_of, reached_at
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.mesh.membership.roster import AdmitResult, Roster
from exo_mesh.mesh.membership.swim import Life, Update

CLASH_S = 1.0
"""How long the known holder of an id may take to answer when another node uses the same id."""

MAX_UNPROVEN = 256
"""Most peers that said hello but have not answered a call yet. Each costs a gRPC channel, 54 KiB once a call on it has
failed; a real peer answers within milliseconds."""

_log = logging.getLogger(__name__)


class Admission:
    """Answers and sends hellos. before_refute: frees what this node no longer owns before it refutes its death.
    on_failure(peer) is called after an exchange with a peer has failed."""

    def __init__(
        self,
        roster: Roster,
        exchange: Exchange,
        before_refute: Callable[[], Awaitable[None]],
        on_failure: Callable[[Peer], None],
    ) -> None:
        self._roster = roster
        self._exchange = exchange
        self._before_refute = before_refute
        self._on_failure = on_failure
        self._syncing: set[str] = set()
        self._unproven: set[str] = set()
        self._returning = False

    async def answer_hello(self, request: HelloRequest, caller_host: str) -> HelloReply:
        """Admit the caller, or reply with the reason of the refusal."""
        roster, caller = self._roster, request.peer
        reply = partial(HelloReply, roster.own, roster.swim.life.refutation)
        addresses = addresses_of(caller, caller_host)
        id_in_use_by = ""
        reason = (
            roster.peer_filter.refusal(roster.own, caller)
            or roster.peer_filter.obstacle(addresses)
            or self._overload(caller)
        )
        if caller.id == roster.own.id:
            id_in_use_by = roster.own.name
        elif not reason and (reason := await self._id_clash(caller)):
            id_in_use_by = roster.peers[caller.id].info.name
        life = Life(caller.incarnation, request.refutation)
        if reason:
            roster.note_refusal(f"{caller.name} at {caller_host}", reason, peer_id=caller.id)
            return reply(reason=reason, id_in_use_by=id_in_use_by)
        if (verdict := roster.verdict_on(caller.id, life)) is not None:
            reason = f"{caller.name} is considered {verdict.state} here"
            return reply(reason=reason, verdict=PeerUpdate(verdict))
        if caller.id not in roster.peers:  # a known peer has proven itself
            self._unproven.add(caller.id)
        self._admit(caller, life, addresses)
        return reply(accepted=True)

    async def say_hello(self, address: str) -> bool:
        """Introduce this node at an address; True if a peer answers and both sides accept each other."""
        roster = self._roster
        client = roster.dial(address)
        try:
            reply = await self._hello_with(client)
        except StrangerError as exc:
            roster.note_refusal(address, str(exc), address=address)
            return False
        except MeshError as exc:
            _log.debug("no answer to the hello to %s: %s", address, exc)
            return False
        finally:
            await client.close()
        answered = reply.peer
        reason = reply.reason if not reply.accepted else roster.peer_filter.refusal(roster.own, answered)
        if reason:
            if reply.verdict is None:
                who = f"{answered.name} at {address}"
                if reply.id_in_use_by and reason != ITSELF:
                    roster.note_id_taken(reply.id_in_use_by)
                roster.note_refusal(who, reason, peer_id=answered.id, address=address)
            return False
        life = Life(answered.incarnation, reply.refutation)
        return self._admit(answered, life, reached_at(answered, address))

    async def introduce_again(self, peer: Peer) -> None:
        """Introduce this node again to a peer that does not know it, because the peer declared it dead or has not heard
        of it yet. Raises MeshError."""
        reply = await self._hello_with(peer.client)
        if not reply.accepted or reply.peer.id != peer.id:
            raise TransportError(f"{peer.info.name} at {peer.client.address} does not admit this node: {reply.reason}")
        self.start_sync(peer)

    def is_unproven(self, peer: Peer) -> bool:
        """Whether a peer has said hello and has not answered a call of this node yet."""
        return peer.id in self._unproven

    def start_sync(self, peer: Peer) -> None:
        """Exchange records with a peer, unless an exchange with it is already running."""
        if peer.id not in self._syncing:
            self._syncing.add(peer.id)
            self._roster.tasks.start(self._sync(peer), f"exchange with {peer.id[:8]}")

    def answer_verdict(self, verdict: Update, sender: ControlPort) -> None:
        """Return to the mesh after a peer has reported that this node is considered dead, unless that is already
        running."""
        if not self._returning and not self._roster.is_asleep:
            self._returning = True
            self._roster.tasks.start(self._return(verdict, sender), "return to the mesh")

    def _admit(self, info: PeerInfo, life: Life, addresses: list[str]) -> bool:
        result = self._roster.admit(info, life, addresses)
        if result is AdmitResult.NEW:
            self.start_sync(self._roster.peers[info.id])
            self._roster.changed.beat()
        return result is not AdmitResult.REFUSED

    async def _hello_with(self, client: ControlPort) -> HelloReply:
        """Say hello. If the peer considers this node dead, refute that and say hello again."""
        roster = self._roster
        if roster.is_asleep:  # a hello under way must not undo the sleep
            raise TransportError("this machine is going to sleep")
        reply = await self._hello_once(client)
        if reply.verdict is None or not roster.swim.is_accused(reply.verdict.update):
            return reply
        if self._returning:
            raise TransportError("this node is already returning to the mesh")
        self._returning = True
        await self._return(reply.verdict.update, client)
        return await self._hello_once(client)

    async def _hello_once(self, client: ControlPort) -> HelloReply:
        roster = self._roster
        return await hello(client, HelloRequest(roster.own, roster.swim.life.refutation), roster.timing.call_s)

    def _overload(self, caller: PeerInfo) -> str:
        """The reason to refuse a caller because too many nodes have only said hello so far; "" if there is room."""
        if len(self._unproven) < MAX_UNPROVEN or caller.id in self._roster.peers:
            return ""
        self._unproven &= self._roster.peers.keys()
        if len(self._unproven) < MAX_UNPROVEN:
            return ""
        return f"{len(self._unproven)} nodes that said hello have not answered yet; try again"

    async def _id_clash(self, caller: PeerInfo) -> str:
        """The reason to refuse a caller whose id is in use by another process that still answers; "" if there is
        none."""
        known = self._roster.peers.get(caller.id)
        if known is None or (known.info.incarnation == caller.incarnation and known.info.name == caller.name):
            return ""
        if known.info.incarnation > caller.incarnation:
            return f"the node with id {caller.id[:8]} has restarted since (incarnation {known.info.incarnation})"
        try:
            reply = await hello(known.client, HelloRequest(self._roster.own), CLASH_S)
        except MeshError:
            return ""
        if reply.peer.id == caller.id and reply.peer.incarnation == known.info.incarnation:
            return f"id {caller.id[:8]} is in use by {known.info.name} at {known.client.address}"
        return ""

    async def _return(self, verdict: Update, client: ControlPort) -> None:
        """Return after the other peers declared this node dead: get the changes, free what this node no longer owns,
        then refute."""
        try:
            _log.warning("other peers consider this node %s; returning to the mesh", verdict.state)
            with contextlib.suppress(MeshError):
                await self._exchange.round(client)
            await self._before_refute()
            self._roster.swim.refute(verdict)
            self._roster.tell_of(self._roster.own.id)
        finally:
            self._returning = False

    async def _sync(self, peer: Peer) -> None:
        try:
            known_there = await self._exchange.round(peer.client)
            self._unproven.discard(peer.id)
            if not known_there:
                await self._hello_with(peer.client)
        except MeshError as exc:
            _log.debug("exchange with %s failed: %s", peer.info.name, exc)
            self._on_failure(peer)
        finally:
            self._syncing.discard(peer.id)
