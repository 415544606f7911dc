"""How two nodes come to know each other, and how one comes back that is held for dead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable

from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import MeshError, StrangerError, TransportError
from exo_mesh.membership.exchange import Exchange
from exo_mesh.membership.messages import update_from_proto, update_to_proto
from exo_mesh.membership.peers import ITSELF, Peer, addresses_of, reached_at
from exo_mesh.membership.port import ControlPort
from exo_mesh.membership.roster import AdmitResult, Roster
from exo_mesh.membership.swim import Life, Update
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.transport import control_codec as codec

CLASH_S = 1.0
"""How long the known holder of an id may take to answer when somebody else comes with it."""

MAX_UNPROVEN = 256
"""Peers that said hello and have answered nothing yet. Each costs a gRPC channel, 54 KiB once a call on it has failed;
a real one answers within milliseconds."""

_log = logging.getLogger(__name__)


class Admission:
    """before_refute: what there is to free before this node says that it lives after all. on_failure(peer) is called
    when an exchange with a peer has failed."""

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
        self._rising = False

    async def answer_hello(self, request: pb.HelloRequest, caller_host: str) -> pb.HelloReply:
        """Admit the caller, or say why not."""
        roster = self._roster
        caller = codec.peer_from_proto(request.peer)
        reply = pb.HelloReply(peer=codec.peer_to_proto(roster.own), refutation=roster.swim.life.refutation)
        addresses = addresses_of(caller, caller_host)
        reply.reason = (
            roster.peer_filter.refusal(roster.own, caller)
            or roster.peer_filter.obstacle(addresses)
            or self._crowd(caller)
        )
        if caller.id == roster.own.id:
            reply.id_in_use_by = roster.own.name
        elif not reply.reason and (reason := await self._clash(caller)):
            reply.reason, reply.id_in_use_by = reason, roster.peers[caller.id].info.name
        life = Life(caller.incarnation, request.refutation)
        if reply.reason:
            roster.note_refusal(f"{caller.name} at {caller_host}", reply.reason, peer_id=caller.id)
        elif (verdict := roster.verdict_on(caller.id, life)) is not None:
            reply.reason = f"{caller.name} is held for {verdict.state} here"
            reply.verdict.CopyFrom(update_to_proto(verdict))
        else:
            if caller.id not in roster.peers:  # one that is known here is not asked again
                self._unproven.add(caller.id)
            self._admit(caller, life, addresses)
            reply.accepted = True
        return reply

    async def say_hello(self, address: str) -> bool:
        """Introduce ourselves at an address; True if a peer answers and both sides accept each other."""
        roster = self._roster
        client = roster.dial(address)
        try:
            reply = await self._hello_with(client)
            answered = codec.peer_from_proto(reply.peer)
        except StrangerError as exc:
            roster.note_refusal(address, str(exc), address=address)
            return False
        except MeshError as exc:
            _log.debug("no hello from %s: %s", address, exc)
            return False
        finally:
            await client.close()
        reason = reply.reason if not reply.accepted else roster.peer_filter.refusal(roster.own, answered)
        if reason:
            if not reply.HasField("verdict"):
                who = f"{answered.name} at {address}"
                if reply.id_in_use_by and reason != ITSELF:
                    roster.note_id_taken(reply.id_in_use_by)
                roster.note_refusal(who, reason, peer_id=answered.id, address=address)
            return False
        life = Life(answered.incarnation, reply.refutation)
        return self._admit(answered, life, reached_at(answered, address))

    async def introduce_again(self, peer: Peer) -> None:
        """The peer has forgotten us: it gave us up for dead, or it has not heard of us yet. Raises MeshError."""
        reply = await self._hello_with(peer.client)
        if not reply.accepted or reply.peer.id != peer.id:
            raise TransportError(f"{peer.info.name} at {peer.client.address} does not take us in: {reply.reason}")
        self.start_sync(peer)

    def start_sync(self, peer: Peer) -> None:
        """Exchange records with a peer, unless that is being done."""
        if peer.id not in self._syncing:
            self._syncing.add(peer.id)
            self._roster.tasks.start(self._sync(peer), f"exchange with {peer.id[:8]}")

    def answer_verdict(self, verdict: Update, teller: ControlPort) -> None:
        """A peer tells that this node is held for dead: come back, unless that is being done."""
        if not self._rising and not self._roster.is_asleep:
            self._rising = True
            self._roster.tasks.start(self._come_back(verdict, teller), "coming back")

    def _admit(self, info: PeerInfo, life: Life, addresses: list[str]) -> bool:
        result = self._roster.admit(info, life, addresses)
        if result is AdmitResult.NEW:
            self.start_sync(self._roster.peers[info.id])
            self._roster.changed.beat()
        return result is not AdmitResult.REFUSED

    async def _hello_with(self, client: ControlPort) -> pb.HelloReply:
        """Say hello; if we are held for dead there, refute that and say it again."""
        roster = self._roster
        if roster.is_asleep:  # what was under way when the machine was said to sleep must not bring it back
            raise TransportError("this machine goes to sleep")
        reply = pb.HelloReply()
        for _ in range(2):
            request = pb.HelloRequest(peer=codec.peer_to_proto(roster.own), refutation=roster.swim.life.refutation)
            reply = await client.hello(request, roster.timing.call_s)
            verdict = update_from_proto(reply.verdict) if reply.HasField("verdict") else None
            if verdict is None or not roster.swim.is_accused(verdict):
                break
            if self._rising:
                raise TransportError("this node is busy with coming back")
            self._rising = True
            await self._come_back(verdict, client)
        return reply

    def _crowd(self, caller: PeerInfo) -> str:
        """Are too many here already that only said hello?"""
        if len(self._unproven) < MAX_UNPROVEN or caller.id in self._roster.peers:
            return ""
        self._unproven &= self._roster.peers.keys()
        if len(self._unproven) < MAX_UNPROVEN:
            return ""
        return f"{len(self._unproven)} nodes that said hello have not answered yet; try again"

    async def _clash(self, caller: PeerInfo) -> str:
        """Is the caller's id in use by another process that still answers?"""
        known = self._roster.peers.get(caller.id)
        if known is None or (known.info.incarnation == caller.incarnation and known.info.name == caller.name):
            return ""
        if known.info.incarnation > caller.incarnation:
            return f"id {caller.id[:8]} is known with a later start (incarnation {known.info.incarnation})"
        try:
            hello = pb.HelloRequest(peer=codec.peer_to_proto(self._roster.own))
            reply = await known.client.hello(hello, CLASH_S)
        except MeshError:
            return ""
        if reply.peer.id == caller.id and reply.peer.incarnation == known.info.incarnation:
            return f"id {caller.id[:8]} is in use by {known.info.name} at {known.client.address}"
        return ""

    async def _come_back(self, verdict: Update, client: ControlPort) -> None:
        """The others hold us for dead: see what has changed, free what is not ours any more, then say that we live."""
        try:
            _log.warning("this node is held for %s by others; coming back", verdict.state)
            with contextlib.suppress(MeshError):
                await self._exchange.round(client)
            await self._before_refute()
            self._roster.swim.refute(verdict)
            self._roster.tell_of(self._roster.own.id)
        finally:
            self._rising = False

    async def _sync(self, peer: Peer) -> None:
        try:
            known_there = await self._exchange.round(peer.client)
            self._unproven.discard(peer.id)
            if not known_there:
                await self._hello_with(peer.client)
        except MeshError as exc:
            _log.debug("no exchange with %s: %s", peer.info.name, exc)
            self._on_failure(peer)
        finally:
            self._syncing.discard(peer.id)
