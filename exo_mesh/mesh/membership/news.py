"""Builds the news about peers and records for outgoing messages, and processes the news in incoming ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.view import Record, RecordKey
from exo_mesh.mesh.membership.messages import PeerUpdate
from exo_mesh.mesh.membership.peers import Peer, reached_at
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.mesh.membership.roster import AdmitResult, Roster
from exo_mesh.mesh.membership.swim import GONE, Life, SwimState, Update
from exo_mesh.wire.probes.messages import MAX_READING_BYTES
from exo_mesh.wire.readings import Reading

MAX_NEWS = 12
MAX_READINGS = 8
"""Most items in one message. A probe has half as many telemetry readings as an exchange; in a small mesh, where every
peer probes every other, it has only the sender's own."""

OWN_READING_S = 0.9
"""How old the own telemetry may be: a little less than a period of probes. It is sent with each probe and each answer,
about twenty times a second among eight peers, and reading it takes a dozen small system files: half the work of an idle
node."""


class News:
    """come_back(verdict, sender) is called when a peer reports that this node is dead."""

    def __init__(
        self,
        roster: Roster,
        read_telemetry: Callable[[], Telemetry],
        come_back: Callable[[Update, ControlPort], None],
    ) -> None:
        self._roster = roster
        self._read_telemetry = read_telemetry
        self._come_back = come_back
        self._own_reading: Reading | None = None
        self._own_read_at = -math.inf

    # Outgoing news.

    def for_peer(self, peer_id: str) -> tuple[tuple[PeerUpdate, ...], tuple[Record, ...]]:
        """The updates and records for one message to a peer: the least-sent ones, and any suspicion against that
        peer."""
        roster = self._roster
        keys = roster.news.take(MAX_NEWS)
        about = [key for key in keys if isinstance(key, str)]
        held = roster.swim.member(peer_id)
        if held is not None and held.state is SwimState.SUSPECT:
            about.append(peer_id)  # so that it can refute it
        records = (roster.records.get(key, roster.clock()) for key in keys if not isinstance(key, str))
        return self.updates(about), tuple(record for record in records if record is not None)

    def updates(self, peer_ids: Iterable[str]) -> tuple[PeerUpdate, ...]:
        """The states of those of the peers that are known; this node is one of them."""
        return tuple(update for one in peer_ids if (update := self._update(one)) is not None)

    def _update(self, peer_id: str) -> PeerUpdate | None:
        roster = self._roster
        update = Update(peer_id, SwimState.ALIVE, roster.swim.life)
        if peer_id != roster.own.id:
            held = roster.swim.update_of(peer_id)
            if held is None:
                return None
            update = held
        record = None
        if update.state is SwimState.ALIVE:
            record = roster.records.get(RecordKey("peer", peer_id, peer_id), roster.clock())
        return PeerUpdate(update, record)

    def readings(self, most: int = MAX_READINGS) -> tuple[Reading, ...]:
        """This node's own telemetry, at most OWN_READING_S old, and a random sample of other peers' telemetry."""
        roster = self._roster
        if self._own_reading is None or roster.clock() >= self._own_read_at + OWN_READING_S:
            self._own_reading, self._own_read_at = Reading.of(self._read_telemetry()), roster.clock()
        if most == 1:
            return (self._own_reading,)
        others = [peer_id for peer_id in roster.records.readings if peer_id != roster.own.id]
        sample = roster.rng.sample(others, min(most - 1, len(others)))
        return (self._own_reading, *map(roster.records.readings.__getitem__, sample))

    def renew_reading(self) -> None:
        """Read this node's own telemetry again for the next message."""
        self._own_read_at = -math.inf

    def probe_readings(self) -> tuple[Reading, ...]:
        """Like `readings`, with as many as fit a probe."""
        return self.readings(1 if self._roster.is_small else MAX_READINGS // 2)

    def datagram_readings(self, peer: Peer) -> tuple[Reading, ...]:
        """Like `probe_readings`, for a datagram to a peer. If the own reading is too long, the datagrams to that peer
        carry its hops in turns."""
        own, *others = self.probe_readings()
        return (peer.short.next(own, MAX_READING_BYTES) if peer.takes_short_readings else own, *others)

    # Incoming news.

    def hear(
        self,
        updates: Iterable[PeerUpdate],
        records: Sequence[Record],
        readings: Iterable[Reading],
        sender: ControlPort,
    ) -> None:
        """Process a peer's news, and pass on the items that are new here. sender: the port by which that peer is
        reached."""
        for update, record in updates:
            self.hear_of(update, record, sender)
        for changed in self.take(records, {}):
            self._roster.tell_of(changed.key)
        for reading in readings:
            self._roster.records.take_reading(reading)

    def hear_of(self, update: Update, record: Record | None, sender: ControlPort) -> None:
        """Process one update. An update about this node is refuted: a suspicion at once, a death after getting the
        changes."""
        swim = self._roster.swim
        if update.peer_id != self._roster.own.id:
            self.learn(update, record)
        elif not swim.is_accused(update):
            return
        elif update.state is SwimState.SUSPECT:
            swim.refute(update)
            self._roster.tell_of(update.peer_id)
        elif update.state is SwimState.DEAD:
            self._come_back(update, sender)

    def learn(self, update: Update, record: Record | None) -> None:
        """Store an update about another peer, and remove the peer if it is gone."""
        roster = self._roster
        peer = roster.peers.get(update.peer_id)
        if update.state is SwimState.ALIVE and (peer is None or peer.info.incarnation < update.life.incarnation):
            if record is not None:
                self.take([record], {update.peer_id: update.life})
            return
        if not roster.swim.learn(update, roster.clock()):
            return
        roster.tell_of(update.peer_id)
        held = roster.swim.member(update.peer_id)
        if held is None or held.state not in GONE or peer is None:
            return
        if update.state is SwimState.LEFT:
            roster.remove(peer, "said goodbye", logging.INFO)
        else:
            roster.remove(peer, "is dead according to other peers", is_lost=True)

    def take(self, records: Sequence[Record], lives: Mapping[str, Life]) -> list[Record]:
        """Merge records and return the changes. Peers in `lives` are admitted, as the sender admitted them."""
        roster = self._roster
        for record in records:
            if record.key.kind == "peer" and record.key.owner in lives:
                self._take_in(record, lives[record.key.owner])
        changed = roster.records.take(records, roster.clock())
        for record in changed:
            if record.key.kind == "peer" and isinstance(record.value, PeerInfo):
                _describe(roster, record.value)
        if changed:
            roster.changed.beat()
        return changed

    def _take_in(self, record: Record, life: Life) -> None:
        """Admit a peer without calling it: in a mesh of n peers that would be n² calls."""
        roster, info = self._roster, record.value
        if (
            not isinstance(info, PeerInfo)
            or (info.id, info.incarnation) != (record.key.owner, life.incarnation)
            or roster.peer_filter.refusal(roster.own, info)
        ):
            return
        if roster.admit(info, life, reached_at(info)) is AdmitResult.NEW:
            roster.changed.beat()


def _describe(roster: Roster, info: PeerInfo) -> None:
    """Store what a peer says of itself now."""
    if (peer := roster.peers.get(info.id)) is not None:
        peer.info = replace(info, incarnation=peer.info.incarnation)
        peer.learn(roster.peer_filter.dialable(info.addresses))
