"""Probes peers, directly and through other peers; every probe and answer carries news."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from exo_mesh.domain.view import InstanceState
from exo_mesh.errors import MeshError, TransportError
from exo_mesh.mesh.membership.calls import Reach, indirect_probe, probe
from exo_mesh.mesh.membership.messages import ProbeReply, ProbeRequest
from exo_mesh.mesh.membership.news import News
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.prefixes import PrefixNews
from exo_mesh.mesh.membership.roster import Roster
from exo_mesh.mesh.membership.swim import SwimState, Update

_log = logging.getLogger(__name__)


REFUSED_S, REFUSED_PAUSE_S = 0.2, 0.1
"""How long a refused connection may take to be reported, and the pause before the second attempt: a process that is
restarting may be between two sockets."""


class Probing:
    """Sends and answers probes. introduce(peer) is awaited when a peer does not know this node. is_calm(instance_id):
    whether no request uses a ring."""

    def __init__(
        self,
        roster: Roster,
        news: News,
        prefixes: PrefixNews,
        introduce: Callable[[Peer], Awaitable[None]],
        sync: Callable[[Peer], None],
        is_calm: Callable[[str], bool] = lambda instance_id: False,
    ) -> None:
        self._roster = roster
        self._news = news
        self._prefixes = prefixes
        self._introduce = introduce
        self._sync = sync
        self._is_calm = is_calm
        self._probing: set[str] = set()

    def start(self, peer: Peer, *, by_call: bool = False) -> None:
        """Probe a peer, unless a probe is running or the peer was removed. Also called right
        after a failed call, because that may be the first sign of a death. by_call: see ControlPort.probe."""
        if peer.id not in self._probing and self._roster.peers.get(peer.id) is peer:
            self._probing.add(peer.id)
            self._roster.tasks.start(self._probe(peer, by_call=by_call), f"probe {peer.id[:8]}")

    async def tell(self, peer: Peer) -> None:
        """Send news to a peer; if it does not answer, probe it."""
        try:
            await self._ask(peer, self._roster.timing.call_s)
        except MeshError:
            self.start(peer)

    def answer(self, request: ProbeRequest, *, by_datagram: bool = False) -> ProbeReply:
        """Answer a probe with this node's identity and news, after processing the caller's news."""
        roster, own = self._roster, self._roster.own
        caller = roster.knows(request.from_peer, request.incarnation)
        news = {} if caller is None else self._answer_news(caller, request, by_datagram)
        return ProbeReply(
            own.id,
            own.incarnation,
            roster.wall_clock(),
            caller is None,
            roster.takes_datagrams,
            keeps_hops=True,
            **news,
        )

    def _answer_news(self, caller: Peer, request: ProbeRequest, by_datagram: bool) -> dict[str, Any]:
        """Process a caller's news; returns the news for it."""
        self._news.hear(request.updates, request.records, request.telemetry, caller.client)
        self._prefixes.hear(request.prefixes)
        own_id = self._roster.own.id
        doubts = (one for one, _ in request.updates if one.peer_id == own_id and one.state is not SwimState.ALIVE)
        refuted = self._news.updates([own_id]) if any(doubts) else ()  # refutes the caller's doubt at once
        updates, records = self._news.for_peer(request.from_peer)
        prefixes = self._prefixes.take(caller.id)
        self._prefixes.reached(caller.id, prefixes)
        view_sum, fences_sum = self._roster.sums
        return {
            "updates": (*refuted, *updates),
            "records": records,
            "telemetry": self._news.datagram_readings(caller) if by_datagram else self._news.probe_readings(),
            "prefixes": prefixes,
            "view_sum": view_sum,
            "fences_sum": fences_sum,
        }

    def answer_datagram(self, request: ProbeRequest, host: str) -> tuple[ProbeReply | None, bool]:
        """The answer to a probe that came as a datagram from `host`, and whether the caller is a peer with that
        address; no other caller gets an answer. Without a reply the caller is asked to call, because there is news for
        it that must not be lost."""
        roster = self._roster
        peer = roster.peers.get(request.from_peer)
        if peer is None or peer.info.incarnation != request.incarnation or host not in peer.ips:
            return None, False
        if request.target != roster.own.id:
            return None, False  # a recorded probe of another peer
        if any(reading.peer_id != peer.id for reading in request.telemetry):
            return None, False  # in an open mesh the sender's address may be forged, so it reports of itself only
        held = roster.swim.member(peer.id)
        is_alive = held is not None and held.state is SwimState.ALIVE
        if roster.news or not is_alive or not roster.is_small or self._prefixes.take(peer.id):
            return None, True
        return self.answer(request, by_datagram=True), True

    async def answer_indirect(self, target: str, incarnation: int) -> Reach:
        """Probe a peer on behalf of a caller that cannot reach it."""
        peer = self._roster.peers.get(target)
        if peer is None or peer.info.incarnation != incarnation:
            return Reach()
        began, probe_s = self._roster.clock(), self._roster.timing.probe_s
        try:
            await self._ask(peer, 0.8 * probe_s, by_call=True)  # leaves time for the reply
        except MeshError:
            is_late = self._roster.clock() - began > probe_s / 4  # silent, so not a refusal
            return Reach(refused=not is_late and await self._is_refused(peer))
        return Reach(reached=True)

    async def _probe(self, peer: Peer, *, by_call: bool) -> None:
        roster, swim = self._roster, self._roster.swim
        began = roster.clock()
        timeout_s = swim.probe_timeout_s
        try:
            await self._ask(peer, timeout_s, by_call=by_call)
            swim.acked(peer.id, roster.clock(), roster.clock() - began)
            return
        except MeshError as exc:
            reason = exc
            peer.unanswered_since = began if peer.unanswered_since is None else peer.unanswered_since
        finally:
            self._probing.discard(peer.id)
        helpers = [roster.peers[one] for one in swim.helpers(peer.id)]
        answers_elsewhere, is_refused, *replies = await asyncio.gather(
            peer.try_next_address(),
            self._is_refused(peer),
            *(indirect_probe(helper.client, roster.own.id, peer.info, timeout_s) for helper in helpers),
            return_exceptions=True,
        )
        by_helper = {helper.id: reply for helper, reply in zip(helpers, replies, strict=True)}
        answers = {one: reply for one, reply in by_helper.items() if isinstance(reply, Reach)}
        if answers_elsewhere is True or any(reply.reached for reply in answers.values()):
            swim.acked(peer.id, roster.clock(), roster.clock() - began)
        else:
            if roster.peers.get(peer.id) is not peer:
                return  # the peer is gone or has restarted
            is_dead = is_refused is True and (not helpers or any(reply.refused for reply in answers.values()))
            found = swim.failed(
                peer.id, began, roster.clock(), asked=len(helpers), answered=list(answers), is_refused=is_dead
            )
            self._failed(peer, found, reason)

    async def _is_refused(self, peer: Peer) -> bool:
        """Whether the peer's machine refuses connections twice at each address that is not known to fail."""
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

    def _must_call(self, peer: Peer) -> bool:
        """Whether a datagram does not do. In a large mesh every probe has news. Whether a suspect can be used must be
        found out. While a request uses a ring that depends on this node or the peer, calls that fail must be noticed
        within the time of a probe; so must they while it is placed."""
        roster = self._roster
        held = roster.swim.member(peer.id)
        if not roster.is_small or held is None or held.state is not SwimState.ALIVE:
            return True
        both = {peer.id, roster.own.id}
        return any(
            (owner in both or not both.isdisjoint(ring.plan.member_ids))
            and not (ring.state is InstanceState.READY and self._is_calm(ring.plan.instance_id))
            for owner, ring in roster.view.records_of_instances()
        )

    def _failed(self, peer: Peer, found: Update | None, reason: MeshError) -> None:
        """Act on the result of a failed probe."""
        if found is None:
            return
        if found.state is SwimState.DEAD:
            self._roster.bury(peer.id)
        else:
            # most suspicions are refuted within a second, so only the death that may follow is news
            _log.debug("peer %s (%s) is suspected: %s", peer.info.name, peer.id[:8], reason)
            self._roster.tell_of(peer.id)

    async def _ask(self, peer: Peer, timeout_s: float, *, by_call: bool = False) -> None:
        """Send a probe and exchange news. Raises MeshError if the peer does not answer, or another process answers.
        by_call: see ControlPort.probe."""
        roster = self._roster
        updates, records = self._news.for_peer(peer.id)
        prefixes = self._prefixes.take(peer.id)
        by_call = bool(by_call or updates or records or prefixes or self._must_call(peer))
        readings = self._news.probe_readings() if by_call else self._news.datagram_readings(peer)
        own = roster.own
        request = ProbeRequest(own.id, own.incarnation, peer.id, updates, records, readings, prefixes)
        began = roster.clock()
        reply = await probe(peer.client, request, timeout_s, by_call=by_call)
        if (reply.peer_id, reply.incarnation) != (peer.id, peer.info.incarnation):
            raise TransportError(f"the node at {peer.client.address} is not {peer.info.name}, or has restarted")
        peer.answered(began, roster.clock())
        if reply.unix_s:
            peer.told_time(reply.unix_s, roster.wall_clock(), roster.clock() - began)
        if reply.unknown_sender:
            await self._introduce(peer)
            return
        self._news.hear(reply.updates, reply.records, reply.telemetry, peer.client)
        self._prefixes.hear(reply.prefixes)
        self._prefixes.reached(peer.id, request.prefixes)
        peer.takes_short_readings = reply.takes_datagrams and reply.keeps_hops
        peer.sends_sums = reply.view_sum is not None
        if peer.sends_sums and (reply.view_sum, reply.fences_sum) != roster.sums:
            self._sync(peer)
