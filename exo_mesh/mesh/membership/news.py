"""Builds the news about peers and records for outgoing messages, and processes the news in incoming ones."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.view import Record, RecordKey
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.messages import update_from_proto, update_to_proto
from exo_mesh.mesh.membership.peers import Peer, reached_at
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.mesh.membership.roster import AdmitResult, Roster
from exo_mesh.mesh.membership.swim import GONE, Life, SwimState, Update
from exo_mesh.wire import control_codec as codec
from exo_mesh.wire.probes.messages import MAX_READING_BYTES
from exo_mesh.wire.proto import control_pb2 as pb

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
        self._own_reading = pb.Telemetry()
        self._own_read_at = -math.inf

    # Outgoing news.

    def for_peer(self, peer_id: str) -> tuple[list[pb.PeerUpdate], list[pb.Record]]:
        """The updates and records for one message to a peer: the least-sent ones, and any suspicion against that
        peer."""
        roster = self._roster
        updates, records = [], []
        for key in roster.news.take(MAX_NEWS):
            if isinstance(key, str):
                updates.append(self.update_message(key))
            elif (record := roster.records.message(key, roster.clock())) is not None:
                records.append(record)
        held = roster.swim.member(peer_id)
        if held is not None and held.state is SwimState.SUSPECT:
            updates.append(self.update_message(peer_id))  # so that it can refute it
        return updates, records

    def update_message(self, peer_id: str) -> pb.PeerUpdate:
        """The state of a peer, or of this node, as a message; empty if the peer is unknown."""
        roster = self._roster
        update = Update(peer_id, SwimState.ALIVE, roster.swim.life)
        if peer_id != roster.own.id:
            held = roster.swim.update_of(peer_id)
            if held is None:
                return pb.PeerUpdate()
            update = held
        record = None
        if update.state is SwimState.ALIVE:
            record = roster.records.message(RecordKey("peer", peer_id, peer_id), roster.clock())
        return update_to_proto(update, record)

    def readings(self, most: int = MAX_READINGS) -> list[pb.Telemetry]:
        """This node's own telemetry, at most OWN_READING_S old, and a random sample of other peers' telemetry."""
        roster = self._roster
        if (now := roster.clock()) >= self._own_read_at + OWN_READING_S:
            self._own_reading, self._own_read_at = codec.telemetry_to_proto(self._read_telemetry()), now
        if most == 1:
            return [self._own_reading]
        others = [peer_id for peer_id in roster.records.readings if peer_id != roster.own.id]
        sample = roster.rng.sample(others, min(most - 1, len(others)))
        return [self._own_reading, *map(roster.records.reading_of, sample)]

    def renew_reading(self) -> None:
        """Read this node's own telemetry again for the next message."""
        self._own_read_at = -math.inf

    def probe_readings(self) -> list[pb.Telemetry]:
        """Like `readings`, with as many as fit a probe."""
        return self.readings(1 if self._roster.is_small else MAX_READINGS // 2)

    def datagram_readings(self, peer: Peer) -> list[pb.Telemetry]:
        """Like `probe_readings`, for a datagram to a peer. If the own reading is too long, the datagrams to that peer
        carry its hops in turns."""
        own, *others = self.probe_readings()
        return [peer.short.next(own, MAX_READING_BYTES) if peer.takes_short_readings else own, *others]

    # Incoming news.

    def hear(
        self,
        updates: Iterable[pb.PeerUpdate],
        records: Iterable[pb.Record],
        readings: Iterable[pb.Telemetry],
        sender: ControlPort,
    ) -> None:
        """Process a peer's news, and pass on the items that are new here. sender: the port by which that peer is
        reached."""
        for message in updates:
            update = update_from_proto(message)
            if update is not None:
                self.hear_of(update, message.record if message.HasField("record") else None, sender)
        for record in self.take(records, {}):
            self._roster.tell_of(record.key)
        for reading in readings:
            self._roster.records.take_reading(reading)

    def hear_of(self, update: Update, record: pb.Record | None, sender: ControlPort) -> None:
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

    def learn(self, update: Update, record: pb.Record | None) -> None:
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

    def take(self, records: Iterable[pb.Record], lives: dict[str, Life]) -> list[Record]:
        """Merge records and return the changes. Peers in `lives` are admitted, as the sender admitted them."""
        roster = self._roster
        records = list(records)
        for message in records:
            if message.kind == "peer" and message.owner in lives and message.HasField("peer"):
                self._take_in(message, lives[message.owner])
        changed = roster.records.take(records, roster.clock())
        for record in changed:
            if record.key.kind == "peer" and isinstance(record.value, PeerInfo):
                _describe(roster, record.value)
        if changed:
            roster.changed.beat()
        return changed

    def _take_in(self, message: pb.Record, life: Life) -> None:
        """Admit a peer without calling it: in a mesh of n peers that would be n² calls."""
        roster = self._roster
        with contextlib.suppress(TransportError):
            info = codec.peer_from_proto(message.peer)
            if (
                info.id != message.owner
                or info.incarnation != life.incarnation
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
