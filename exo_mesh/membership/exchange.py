"""Anti-entropy: a round between two peers, after which both hold the same records and deletions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from exo_mesh.membership.fences import Fence
from exo_mesh.membership.messages import fence_from_proto, fence_to_proto, summary_to_proto, update_in_summary
from exo_mesh.membership.news import News
from exo_mesh.membership.port import ControlPort
from exo_mesh.membership.roster import Roster
from exo_mesh.membership.swim import GONE, Life, SwimState, Update
from exo_mesh.proto import control_pb2 as pb

ROUND_BYTES = 512 * 1024
"""Records and updates in one message; what does not fit comes with a later round. A receiver takes 1 MiB."""

_Item = TypeVar("_Item", pb.Record, pb.PeerUpdate, pb.Fence)


class _Room:
    """What still fits into one message."""

    def __init__(self) -> None:
        self._left = ROUND_BYTES

    def fitting(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items that fit, in order. One that does not keeps none of the others back."""
        for item in items:
            size = item.ByteSize()
            if size <= self._left:
                self._left -= size
                yield item


class Exchange:
    """Compares a 64-bit sum; only if it differs, a summary per owner, and then the records of owners that differ.

    Deletions of instances have a sum of their own. If that differs, the side that was called sends all of its own, and
    the caller then those that were not among them.
    """

    def __init__(self, roster: Roster, news: News) -> None:
        self._roster = roster
        self._news = news

    def answer(self, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        """One half of a round, as the side that was called."""
        roster = self._roster
        now = roster.clock()
        reply = pb.ExchangeReply()
        if (caller := roster.knows(request.from_peer, request.incarnation)) is not None:
            self._news.hear(request.updates, request.push, request.telemetry, caller.client)
            reply.telemetry.extend(self._news.readings())
        elif roster.swim.member(request.from_peer) is None:
            return pb.ExchangeReply(unknown_sender=True)
        else:  # held for dead: it may look, to learn what it must free before it comes back
            reply.unknown_sender = True
        room = _Room()
        for owner in request.want:
            reply.newer.extend(room.fitting(roster.records.messages_of(owner, now)))
        if caller is not None:
            roster.take_fences(map(fence_from_proto, request.fences))
        self._answer_fences(request, reply, room)
        if not request.want and not request.push and request.digest != roster.view.sum:
            reply.summary.extend(self._summaries())
        return reply

    async def round(self, client: ControlPort) -> bool:
        """Two calls if there is a difference, one if there is none. False if we are unknown there. Raises MeshError."""
        roster = self._roster
        own, call_s = roster.own, roster.timing.call_s
        request = pb.ExchangeRequest(
            from_peer=own.id,
            incarnation=own.incarnation,
            digest=roster.view.sum,
            telemetry=self._news.readings(),
            fences_digest=roster.records.fences.sum,
        )
        reply = await client.exchange(request, call_s)
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
            reply = await client.exchange(second, call_s)
            self._news.take(reply.newer, lives)
        return not reply.unknown_sender

    def _compare(
        self, summaries: Iterable[pb.OwnerSummary], second: pb.ExchangeRequest, client: ControlPort
    ) -> dict[str, Life]:
        """Fill in the second half of a round; answers the lives of peers that only the other side knows."""
        roster = self._roster
        now = roster.clock()
        room = _Room()
        lives: dict[str, Life] = {}
        there: set[str] = set()
        for summary in summaries:
            told = update_in_summary(summary)
            if told is None:
                continue
            held = roster.swim.member(told.peer_id)
            if told.state in GONE or told.peer_id == roster.own.id or held is not None:
                self._news.hear_of(told, None, client)
            if told.state in GONE:
                continue
            there.add(told.peer_id)
            if told.peer_id != roster.own.id and told.peer_id not in roster.peers:
                if held is None or told.life > held.life:
                    lives[told.peer_id] = told.life
                    second.want.append(told.peer_id)
                continue
            push, want = roster.records.differs(summary)
            if push:
                second.push.extend(room.fitting(roster.records.messages_of(told.peer_id, now)))
            if want and told.peer_id != roster.own.id:
                second.want.append(told.peer_id)
        for peer_id in [roster.own.id, *roster.peers]:
            if peer_id not in there:
                second.updates.extend(room.fitting([self._news.update_message(peer_id)]))
                second.push.extend(room.fitting(roster.records.messages_of(peer_id, now)))
        return lives

    def _answer_fences(self, request: pb.ExchangeRequest, reply: pb.ExchangeReply, room: _Room) -> None:
        """The deletions held here, if the caller holds others."""
        fences = self._roster.records.fences
        reply.fences_digest = fences.sum
        if not request.fences and request.fences_digest != fences.sum:
            reply.fences.extend(room.fitting(map(fence_to_proto, self._own_fences())))

    def _missing_there(self, reply: pb.ExchangeReply) -> list[pb.Fence]:
        """Take over the deletions that came; those that the other side does not hold, as far as they fit."""
        there = [fence_from_proto(message) for message in reply.fences]
        self._roster.take_fences(there)
        if reply.fences_digest == self._roster.records.fences.sum:
            return []
        held = {(fence.instance_id, fence.ballot) for fence in there}
        missing = (fence for fence in self._own_fences() if (fence.instance_id, fence.ballot) not in held)
        return list(_Room().fitting(map(fence_to_proto, missing)))

    def _own_fences(self) -> list[Fence]:
        """In random order: if they do not all fit into a message, each round moves others."""
        fences = list(self._roster.records.fences.all(self._roster.clock()))
        self._roster.rng.shuffle(fences)
        return fences

    def _summaries(self) -> list[pb.OwnerSummary]:
        swim, view = self._roster.swim, self._roster.view
        held = [*swim.updates(), Update(self._roster.own.id, SwimState.ALIVE, swim.life)]
        return [summary_to_proto(one, view.newest_of(one.peer_id), view.sum_of(one.peer_id)) for one in held]
