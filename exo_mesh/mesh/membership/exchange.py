"""Anti-entropy: compares records and deletions with one peer and exchanges the differences."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TypeVar

from exo_mesh.errors import MeshError
from exo_mesh.mesh.membership.calls import EXCHANGE
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.messages import fence_from_proto, fence_to_proto, summary_to_proto, update_in_summary
from exo_mesh.mesh.membership.news import News
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.mesh.membership.roster import Roster
from exo_mesh.mesh.membership.swim import GONE, Life, SwimState, Update
from exo_mesh.wire.proto import control_pb2 as pb

ROUND_BYTES = 512 * 1024
"""Most bytes of records and updates in one message; the rest follows in a later round. A receiver accepts 1 MiB."""

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item", pb.Record, pb.PeerUpdate, pb.Fence)


class _Room:
    """Counts the bytes that still fit into one message."""

    def __init__(self) -> None:
        self._left = ROUND_BYTES

    def fitting(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items that fit, in order. An item that does not fit is skipped, and smaller ones after it may still
        fit."""
        for item in items:
            size = item.ByteSize()
            if size <= self._left:
                self._left -= size
                yield item


class Exchange:
    """Compares a 64-bit sum. If it differs, the peers exchange a summary per owner, then the records of owners that
    differ.

    Deletions of instances have their own sum. If that differs, the called side sends all its deletions, and the caller
    then sends those that were missing.
    """

    def __init__(self, roster: Roster, news: News) -> None:
        self._roster = roster
        self._news = news
        self._asking: set[str] = set()

    def answer(self, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        """Answer one call of a round, as the called side."""
        roster = self._roster
        now = roster.clock()
        reply = pb.ExchangeReply()
        if (caller := roster.knows(request.from_peer, request.incarnation)) is not None:
            self._news.hear(request.updates, request.push, request.telemetry, caller.client)
            reply.telemetry.extend(self._news.readings())
        elif roster.swim.member(request.from_peer) is None:
            return pb.ExchangeReply(unknown_sender=True)
        else:  # considered dead: it reads what it must free before it returns
            reply.unknown_sender = True
        room = _Room()
        for owner in request.want:
            reply.newer.extend(room.fitting(roster.records.messages_of(owner, now)))
        if caller is not None and request.fences:
            self._ask_for_fences(caller)
        self._answer_fences(request, reply, room)
        if not request.want and not request.push and request.digest != roster.view.sum:
            reply.summary.extend(self._summaries())
        return reply

    async def round(self, client: ControlPort) -> bool:
        """Run one round as the caller: two calls if something differs, otherwise one. False if the peer does not know
        this node. Raises MeshError."""
        roster = self._roster
        own, call_s = roster.own, roster.timing.call_s
        request = pb.ExchangeRequest(
            from_peer=own.id,
            incarnation=own.incarnation,
            digest=roster.view.sum,
            telemetry=self._news.readings(),
            fences_digest=roster.records.fences.sum,
        )
        reply = await client.call(EXCHANGE, request, call_s)
        self._news.hear(reply.updates, (), reply.telemetry, client)
        fences = self._missing_there(reply)
        if not reply.summary and not fences:
            return not reply.unknown_sender
        second = pb.ExchangeRequest(
            from_peer=own.id,
            incarnation=own.incarnation,
            digest=roster.view.sum,
            fences_digest=roster.records.fences.sum,
            fences=fences,
        )
        lives = self._compare(reply.summary, second, client) if reply.summary else {}
        if second.want or second.push or second.updates or second.fences:
            reply = await client.call(EXCHANGE, second, call_s)
            self._news.take(reply.newer, lives)
        return not reply.unknown_sender

    def _compare(
        self, summaries: Iterable[pb.OwnerSummary], second: pb.ExchangeRequest, client: ControlPort
    ) -> dict[str, Life]:
        """Fill in the second call of a round. Returns the lives of peers that only the other side knows."""
        roster = self._roster
        now = roster.clock()
        room = _Room()
        lives: dict[str, Life] = {}
        there: set[str] = set()
        for summary in summaries:
            update = update_in_summary(summary)
            if update is None:
                continue
            held = roster.swim.member(update.peer_id)
            if update.state in GONE or update.peer_id == roster.own.id or held is not None:
                self._news.hear_of(update, None, client)
            if update.state in GONE:
                continue
            there.add(update.peer_id)
            if update.peer_id != roster.own.id and update.peer_id not in roster.peers:
                if held is None or update.life > held.life:
                    lives[update.peer_id] = update.life
                    second.want.append(update.peer_id)
                continue
            push, want = roster.records.differs(summary)
            if push:
                second.push.extend(room.fitting(roster.records.messages_of(update.peer_id, now)))
            if want and update.peer_id != roster.own.id:
                second.want.append(update.peer_id)
        for peer_id in [roster.own.id, *roster.peers]:
            if peer_id not in there:
                second.updates.extend(room.fitting([self._news.update_message(peer_id)]))
                second.push.extend(room.fitting(roster.records.messages_of(peer_id, now)))
        return lives

    def _ask_for_fences(self, peer: Peer) -> None:
        """Ask a peer for the deletions that a caller sent in its name. Anybody in an open mesh can send them, and only
        the connection that this node opens shows who is there."""
        if peer.id not in self._asking:
            self._asking.add(peer.id)
            self._roster.tasks.start(self._take_fences_of(peer), f"deletions of {peer.id[:8]}")

    async def _take_fences_of(self, peer: Peer) -> None:
        try:
            await self.round(peer.client)
        except MeshError as exc:
            _log.debug("asking %s for deletions failed: %s", peer.info.name, exc)
        finally:
            self._asking.discard(peer.id)

    def _answer_fences(self, request: pb.ExchangeRequest, reply: pb.ExchangeReply, room: _Room) -> None:
        """Reply with all deletions held here, if the caller holds different ones."""
        fences = self._roster.records.fences
        reply.fences_digest = fences.sum
        if not request.fences and request.fences_digest != fences.sum:
            reply.fences.extend(room.fitting(map(fence_to_proto, self._own_fences())))

    def _missing_there(self, reply: pb.ExchangeReply) -> list[pb.Fence]:
        """Store the received deletions. Returns deletions that the other side lacks, as far as they fit into a
        message."""
        there = [fence_from_proto(message) for message in reply.fences]
        self._roster.take_fences(there)
        if reply.fences_digest == self._roster.records.fences.sum:
            return []
        held = {(fence.instance_id, fence.ballot) for fence in there}
        missing = (fence for fence in self._own_fences() if (fence.instance_id, fence.ballot) not in held)
        return list(_Room().fitting(map(fence_to_proto, missing)))

    def _own_fences(self) -> list[Fence]:
        """The deletions held here, in random order: if they do not all fit into a message, each round sends different
        ones."""
        fences = list(self._roster.records.fences.all(self._roster.clock()))
        self._roster.rng.shuffle(fences)
        return fences

    def _summaries(self) -> list[pb.OwnerSummary]:
        swim, view = self._roster.swim, self._roster.view
        held = [*swim.updates(), Update(self._roster.own.id, SwimState.ALIVE, swim.life)]
        return [summary_to_proto(one, view.newest_of(one.peer_id), view.sum_of(one.peer_id)) for one in held]
