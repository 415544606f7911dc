"""News of peers and records: what goes into a message, and what is done with what comes in one."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.view import Record, RecordKey
from exo_mesh.errors import TransportError
from exo_mesh.membership.messages import update_from_proto, update_to_proto
from exo_mesh.membership.peers import reached_at
from exo_mesh.membership.port import ControlPort
from exo_mesh.membership.roster import AdmitResult, Roster
from exo_mesh.membership.swim import GONE, Life, SwimState, Update
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.transport import control_codec as codec

MAX_NEWS = 12
MAX_READINGS = 8
"""Items in one message. A probe has half as many readings as an exchange; where all are probed, only one's own."""

OWN_READING_S = 0.5
"""How old one's own reading may be. Each probe and each answer to one tells it, some twenty times a second among eight
peers, and to make it takes a dozen small files of the system: half the work of an idle node."""


class News:
    """come_back(verdict, teller) is called when somebody says that this very node is dead."""

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

    # what is told

    def for_peer(self, peer_id: str) -> tuple[list[pb.PeerUpdate], list[pb.Record]]:
        """A message's worth for a peer: what was told least so far, and what it must know of itself."""
        roster = self._roster
        updates, records = [], []
        for key in roster.news.take(MAX_NEWS):
            if isinstance(key, str):
                updates.append(self.update_message(key))
            elif (record := roster.records.message(key, roster.clock())) is not None:
                records.append(record)
        held = roster.swim.member(peer_id)
        if held is not None and held.state is SwimState.SUSPECT:
            updates.append(self.update_message(peer_id))  # it must hear of it, to refute it
        return updates, records

    def update_message(self, peer_id: str) -> pb.PeerUpdate:
        """What is held of a peer, or of this node; empty if nothing is."""
        roster = self._roster
        update = Update(peer_id, SwimState.ALIVE, roster.swim.life)
        if peer_id != roster.own.id:
            told = roster.swim.update_of(peer_id)
            if told is None:
                return pb.PeerUpdate()
            update = told
        record = None
        if update.state is SwimState.ALIVE:
            record = roster.records.message(RecordKey("peer", peer_id, peer_id), roster.clock())
        return update_to_proto(update, record)

    def readings(self, most: int = MAX_READINGS) -> list[pb.Telemetry]:
        """Our own reading, at most OWN_READING_S old, and a few of what we have of others."""
        roster = self._roster
        if (now := roster.clock()) >= self._own_read_at + OWN_READING_S:
            self._own_reading, self._own_read_at = codec.telemetry_to_proto(self._read_telemetry()), now
        if most == 1:
            return [self._own_reading]
        others = [peer_id for peer_id in roster.records.telemetry if peer_id != roster.own.id]
        sample = roster.rng.sample(others, min(most - 1, len(others)))
        return [self._own_reading, *map(roster.records.reading_of, sample)]

    def probe_readings(self) -> list[pb.Telemetry]:
        """As `readings`, for a probe."""
        return self.readings(1 if self._roster.is_small else MAX_READINGS // 2)

    # what is heard

    def hear(
        self,
        updates: Iterable[pb.PeerUpdate],
        records: Iterable[pb.Record],
        readings: Iterable[pb.Telemetry],
        teller: ControlPort,
    ) -> None:
        """Take in what a peer told, and pass on what of it is new. teller: how that peer is reached."""
        for message in updates:
            update = update_from_proto(message)
            if update is not None:
                self.hear_of(update, message.record if message.HasField("record") else None, teller)
        for record in self.take(records, {}):
            self._roster.tell_of(record.key)
        for reading in readings:
            self._roster.records.take_reading(reading)

    def hear_of(self, update: Update, record: pb.Record | None, teller: ControlPort) -> None:
        """Take in one item. What is said of this node itself is answered: a suspicion at once, a death after a look at
        what has changed."""
        swim = self._roster.swim
        if update.peer_id != self._roster.own.id:
            self.learn(update, record)
        elif not swim.is_accused(update):
            return
        elif update.state is SwimState.SUSPECT:
            swim.refute(update)
            self._roster.tell_of(update.peer_id)
        elif update.state is SwimState.DEAD:
            self._come_back(update, teller)

    def learn(self, update: Update, record: pb.Record | None) -> None:
        """Take in news of another peer."""
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
            roster.remove(peer, "is dead, others say", is_lost=True)

    def take(self, records: Iterable[pb.Record], lives: dict[str, Life]) -> list[Record]:
        """Merge records; peers of `lives` are taken in on the word of the sender, which has admitted them."""
        roster = self._roster
        records = list(records)
        for message in records:
            if message.kind == "peer" and message.owner in lives and message.HasField("peer"):
                self._take_in(message, lives[message.owner])
        changed = roster.records.take(records, roster.clock())
        for record in changed:
            if isinstance(record.value, PeerInfo) and (peer := roster.peers.get(record.value.id)):
                peer.info = replace(record.value, incarnation=peer.info.incarnation)
                peer.learn(roster.peer_filter.dialable(peer.info.addresses))
        if changed:
            roster.changed.beat()
        return changed

    def _take_in(self, message: pb.Record, life: Life) -> None:
        """Nothing is asked of the peer now: a mesh of n would do so n² times."""
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
