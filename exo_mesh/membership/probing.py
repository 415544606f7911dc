"""Asking whether a peer lives, directly and through others; every question and answer carries news."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from exo_mesh.errors import MeshError, TransportError
from exo_mesh.membership.news import News
from exo_mesh.membership.peers import Peer
from exo_mesh.membership.roster import Roster
from exo_mesh.membership.swim import SwimState, Update
from exo_mesh.proto import control_pb2 as pb

_log = logging.getLogger(__name__)


REFUSED_S, REFUSED_PAUSE_S = 0.2, 0.1
"""How long an answer that nobody listens may take, and the pause before it is asked for again: a process that is
restarted may be between two sockets."""


class Probing:
    """introduce(peer) is awaited when a peer does not know us."""

    def __init__(self, roster: Roster, news: News, introduce: Callable[[Peer], Awaitable[None]]) -> None:
        self._roster = roster
        self._news = news
        self._introduce = introduce
        self._probing: set[str] = set()

    def start(self, peer: Peer) -> None:
        """Probe a peer, unless that is being done or it is no peer any more. Where a call that was no probe has failed,
        this does not wait for its turn: it may be the first sign of a death."""
        if peer.id not in self._probing and self._roster.peers.get(peer.id) is peer:
            self._probing.add(peer.id)
            self._roster.tasks.start(self._probe(peer), f"probe {peer.id[:8]}")

    async def tell(self, peer: Peer) -> None:
        """Tell a peer news; if it does not answer, probe it."""
        try:
            await self._ask(peer, self._roster.timing.call_s)
        except MeshError:
            self.start(peer)

    def answer(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        """Yes, this is who lives here; and news for news."""
        own = self._roster.own
        reply = pb.ProbeReply(peer_id=own.id, incarnation=own.incarnation, unix_s=self._roster.wall_clock())
        caller = self._roster.knows(request.from_peer, request.incarnation)
        if caller is None:
            reply.unknown_sender = True
            return reply
        self._news.hear(request.updates, request.records, request.telemetry, caller.client)
        if any(update.peer_id == own.id and update.state != pb.PEER_STATE_ALIVE for update in request.updates):
            reply.updates.append(self._news.update_message(own.id))  # who doubts it hears at once that we live
        updates, records = self._news.for_peer(request.from_peer)
        reply.updates.extend(updates)
        reply.records.extend(records)
        reply.telemetry.extend(self._news.probe_readings())
        return reply

    async def answer_indirect(self, request: pb.IndirectProbeRequest) -> pb.IndirectProbeReply:
        """Can this node reach somebody whom the caller cannot?"""
        peer = self._roster.peers.get(request.target)
        if peer is None or peer.info.incarnation != request.incarnation:
            return pb.IndirectProbeReply()
        began, probe_s = self._roster.clock(), self._roster.timing.probe_s
        try:
            await self._ask(peer, 0.8 * probe_s)  # so that the caller hears of a failure in its time
        except MeshError:
            is_late = self._roster.clock() - began > probe_s / 4  # then the machine is silent, and refuses nothing
            return pb.IndirectProbeReply(refused=not is_late and await self._is_refused(peer))
        return pb.IndirectProbeReply(reached=True)

    async def _probe(self, peer: Peer) -> None:
        roster, swim = self._roster, self._roster.swim
        began = roster.clock()
        timeout_s = swim.probe_timeout_s
        try:
            await self._ask(peer, timeout_s)
            swim.acked(peer.id, roster.clock(), roster.clock() - began)
            return
        except MeshError as exc:
            reason = exc
            peer.unanswered_since = began if peer.unanswered_since is None else peer.unanswered_since
        finally:
            self._probing.discard(peer.id)
        helpers = [roster.peers[one] for one in swim.helpers(peer.id)]
        request = pb.IndirectProbeRequest(
            from_peer=roster.own.id, target=peer.id, incarnation=peer.info.incarnation
        )  # fmt: skip
        answers_elsewhere, is_refused, *replies = await asyncio.gather(
            peer.try_next_address(),
            self._is_refused(peer),
            *(helper.client.indirect_probe(request, timeout_s) for helper in helpers),
            return_exceptions=True,
        )
        answers = [reply for reply in replies if isinstance(reply, pb.IndirectProbeReply)]
        if answers_elsewhere is True or any(reply.reached for reply in answers):
            swim.acked(peer.id, roster.clock(), roster.clock() - began)
        else:
            if roster.peers.get(peer.id) is not peer:
                return  # it is gone, or has restarted meanwhile
            is_dead = is_refused is True and (not helpers or any(reply.refused for reply in answers))
            found = swim.failed(
                peer.id, began, roster.clock(), asked=len(helpers), answered=len(answers), is_refused=is_dead
            )
            self._failed(peer, found, reason)

    async def _is_refused(self, peer: Peer) -> bool:
        """Whether its machine answers, twice at each address that is not known to fail, that nobody listens there."""
        others = [address for address in peer.addresses if address != peer.client.address]
        used = [address for address in others if address not in peer.paths or not peer.paths[address].failed]
        clients = [peer.client.at(address) for address in used]
        try:
            for pause_s in (0.0, REFUSED_PAUSE_S):
                await asyncio.sleep(pause_s)
                asked = (client.is_refused(REFUSED_S) for client in (peer.client, *clients))
                if not all(await asyncio.gather(*asked)):
                    return False
            return True
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    def _failed(self, peer: Peer, found: Update | None, reason: MeshError) -> None:
        """Act on what a failed probe has shown."""
        if found is None:
            return
        if found.state is SwimState.DEAD:
            self._roster.bury(peer.id)
        else:
            _log.info("peer %s (%s) is suspected: %s", peer.info.name, peer.id[:8], reason)
            self._roster.tell_of(peer.id)

    async def _ask(self, peer: Peer, timeout_s: float) -> None:
        """A probe, with news both ways. Raises MeshError if the peer does not answer, or somebody else does."""
        roster = self._roster
        updates, records = self._news.for_peer(peer.id)
        request = pb.ProbeRequest(
            from_peer=roster.own.id,
            incarnation=roster.own.incarnation,
            target=peer.id,
            updates=updates,
            records=records,
            telemetry=self._news.probe_readings(),
        )
        began = roster.clock()
        reply = await peer.client.probe(request, timeout_s)
        if (reply.peer_id, reply.incarnation) != (peer.id, peer.info.incarnation):
            raise TransportError(f"the node at {peer.client.address} is not {peer.info.name} of this start")
        peer.answered(began, roster.clock())
        if reply.unix_s:
            peer.told_time(reply.unix_s, roster.wall_clock(), roster.clock() - began)
        if reply.unknown_sender:
            await self._introduce(peer)
        else:
            self._news.hear(reply.updates, reply.records, reply.telemetry, peer.client)
