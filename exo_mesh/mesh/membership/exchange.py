"""Anti-entropy: compares records and deletions with one peer and exchanges the differences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from exo_mesh.domain.view import Record
from exo_mesh.errors import MeshError
from exo_mesh.mesh.membership.calls import exchange
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.messages import ExchangeReply, ExchangeRequest, OwnerSummary, PeerUpdate
from exo_mesh.mesh.membership.news import News
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.mesh.membership.roster import Roster
from exo_mesh.mesh.membership.swim import GONE, Life, SwimState, Update
from exo_mesh.wire.control_codec import record_bytes
from exo_mesh.wire.readings import Reading

ROUND_BYTES = 512 * 1024
"""Most bytes of records and updates in one message; the rest follows in a later round. A receiver accepts 1 MiB."""

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item")

_NUMBERS_BYTES = 48
"""Most bytes of the numbers of an update or a deletion, and of the tags and lengths of its parts."""


class _Room:
    """Counts the bytes that still fit into one message."""

    def __init__(self) -> None:
        self._left = ROUND_BYTES

    def fitting(self, items: Iterable[_Item], num_bytes: Callable[[_Item], int]) -> Iterator[_Item]:
        """The items that fit, in order. An item that does not fit is skipped, and smaller ones after it may still
        fit."""
        for item in items:
            size = num_bytes(item)
            if size <= self._left:
                self._left -= size
                yield item


def _update_bytes(message: PeerUpdate) -> int:
    """The length of an update as it is sent, or a little more."""
    update, record = message
    texts = "--".join((update.peer_id, *update.accusers))
    return _NUMBERS_BYTES + len(texts.encode()) + (0 if record is None else record_bytes(record))


def _fence_bytes(fence: Fence) -> int:
    """The length of a deletion as it is sent, or a little more."""
    return _NUMBERS_BYTES + len(f"{fence.instance_id}{fence.ballot.proposer}".encode())


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

    def answer(self, request: ExchangeRequest) -> ExchangeReply:
        """Answer one call of a round, as the called side."""
        roster, records = self._roster, self._roster.records
        readings: tuple[Reading, ...] = ()
        if (caller := roster.knows(request.from_peer, request.incarnation)) is not None:
            self._news.hear(request.updates, request.push, request.telemetry, caller.client)
            readings = self._news.readings()
        elif roster.swim.member(request.from_peer) is None:
            return ExchangeReply(unknown_sender=True)
        room = _Room()
        wanted = (record for owner in request.want for record in records.of_owner(owner, roster.clock()))
        newer = tuple(room.fitting(wanted, record_bytes))
        if caller is not None and request.fences:
            self._ask_for_fences(caller)
        fences_differ = not request.fences and request.fences_digest != records.fences.sum
        is_first = not request.want and not request.push
        return ExchangeReply(
            unknown_sender=caller is None,  # considered dead: it reads what it must free before it returns
            summary=self._summaries() if is_first and request.digest != roster.view.sum else (),
            newer=newer,
            telemetry=readings,
            fences_digest=records.fences.sum,
            fences=tuple(room.fitting(self._own_fences(), _fence_bytes)) if fences_differ else (),
        )

    async def round(self, client: ControlPort) -> bool:
        """Run one round as the caller: two calls if something differs, otherwise one. False if the peer does not know
        this node. Raises MeshError."""
        roster = self._roster
        reply = await exchange(client, self._request(telemetry=self._news.readings()), roster.timing.call_s)
        self._news.hear(reply.updates, (), reply.telemetry, client)
        fences = self._missing_there(reply)
        if reply.summary or fences:
            second, lives = self._compare(reply.summary, fences, client)
            if second.want or second.push or second.updates or second.fences:
                reply = await exchange(client, second, roster.timing.call_s)
                self._news.take(reply.newer, lives)
        return not reply.unknown_sender

    def _request(self, **content: Any) -> ExchangeRequest:
        own, records = self._roster.own, self._roster.records
        return ExchangeRequest(
            own.id, own.incarnation, digest=records.view.sum, fences_digest=records.fences.sum, **content
        )

    def _compare(
        self, summaries: Sequence[OwnerSummary], fences: tuple[Fence, ...], client: ControlPort
    ) -> tuple[ExchangeRequest, dict[str, Life]]:
        """The second call of a round, and the lives of peers that only the other side knows."""
        roster, records = self._roster, self._roster.records
        now, room = roster.clock(), _Room()
        lives: dict[str, Life] = {}
        push: list[Record] = []
        want: list[str] = []
        updates: list[PeerUpdate] = []
        for summary in summaries:
            update = summary.update
            held = roster.swim.member(update.peer_id)
            if update.state in GONE or update.peer_id == roster.own.id or held is not None:
                self._news.hear_of(update, None, client)
            if update.state in GONE:
                continue
            if update.peer_id != roster.own.id and update.peer_id not in roster.peers:
                if held is None or update.life > held.life:
                    lives[update.peer_id] = update.life
                    want.append(update.peer_id)
                continue
            is_newer_here, is_newer_there = records.differs(summary)
            if is_newer_here:
                push.extend(room.fitting(records.of_owner(update.peer_id, now), record_bytes))
            if is_newer_there and update.peer_id != roster.own.id:
                want.append(update.peer_id)
        there = {summary.owner for summary in summaries if summary.state not in GONE}
        for peer_id in [roster.own.id, *roster.peers] if summaries else []:
            if peer_id not in there:
                updates.extend(room.fitting(self._news.updates([peer_id]), _update_bytes))
                push.extend(room.fitting(records.of_owner(peer_id, now), record_bytes))
        second = self._request(want=tuple(want), push=tuple(push), updates=tuple(updates), fences=fences)
        return second, lives

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

    def _missing_there(self, reply: ExchangeReply) -> tuple[Fence, ...]:
        """Store the received deletions. Returns deletions that the other side lacks, as far as they fit into a
        message."""
        self._roster.take_fences(reply.fences)
        if reply.fences_digest == self._roster.records.fences.sum:
            return ()
        held = {(fence.instance_id, fence.ballot) for fence in reply.fences}
        missing = (fence for fence in self._own_fences() if (fence.instance_id, fence.ballot) not in held)
        return tuple(_Room().fitting(missing, _fence_bytes))

    def _own_fences(self) -> list[Fence]:
        """The deletions held here, in random order: if they do not all fit into a message, each round sends different
        ones."""
        fences = list(self._roster.records.fences.all(self._roster.clock()))
        self._roster.rng.shuffle(fences)
        return fences

    def _summaries(self) -> tuple[OwnerSummary, ...]:
        swim, view = self._roster.swim, self._roster.view
        held = [*swim.updates(), Update(self._roster.own.id, SwimState.ALIVE, swim.life)]
        return tuple(
            OwnerSummary(one.peer_id, one.state, one.life, view.newest_of(one.peer_id), view.sum_of(one.peer_id))
            for one in held
        )
