"""Stores the records of the mesh and enforces which records this peer may accept and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from exo_mesh.domain.device import Telemetry
from exo_mesh.domain.view import TOMBSTONE_S, Record, RecordKey, RecordValue, Unread, View
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.fences import Fences
from exo_mesh.mesh.membership.peers import VERSIONS_PER_INCARNATION
from exo_mesh.mesh.membership.short_readings import completed
from exo_mesh.wire.control_codec import (
    key_of,
    record_from_proto,
    record_to_proto,
    telemetry_from_proto,
    telemetry_to_proto,
    unread_record,
)
from exo_mesh.wire.proto import control_pb2 as pb

MAX_AS_SENT_BYTES = 512 * 1024
"""Most bytes per owner that are kept as received. A peer's own record with 1,024 models has about 100 KiB. Beyond that
a record is read at once, because what is read is bounded."""

MAX_READING_BYTES = 16 * 1024
"""Longest telemetry reading that is kept as received; a longer one is read at once, and passed on without fields
unknown here."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A telemetry reading as it came, or this node's own. sequence, keys_digest: see Telemetry."""

    sequence: int
    keys_digest: int
    content: Telemetry | Unread[Telemetry]

    @property
    def value(self) -> Telemetry:
        return self.content.value if isinstance(self.content, Unread) else self.content


class Readings(Mapping[str, Telemetry]):
    """The telemetry of peers at one time, by id. A reading is decoded when it is first looked at."""

    def __init__(self, readings: Mapping[str, Reading]) -> None:
        self._readings = dict(readings)

    def __getitem__(self, peer_id: str) -> Telemetry:
        return self._readings[peer_id].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._readings)

    def __len__(self) -> int:
        return len(self._readings)

    def __contains__(self, peer_id: object) -> bool:
        return peer_id in self._readings


class Records:
    """Holds the view, this node's own records, the telemetry of all peers, and the deletions of instances. Deletions
    have no owner: they outlive the peer that was asked to delete.

    Only records of living owners in their present incarnation are accepted, so a dead peer's records do not return.
    Records and readings of others are kept as received, so that a peer with a newer version gets all of them.
    """

    def __init__(self, own_id: str, own_incarnation: int, incarnation_of: Callable[[str], int | None]) -> None:
        self.view = View()
        self.fences = Fences()
        self.readings: dict[str, Reading] = {}
        self._own_id = own_id
        self._incarnation_of = incarnation_of
        self._version = own_incarnation * VERSIONS_PER_INCARNATION

    def write(self, kind: str, record_id: str, value: RecordValue | None, now: float) -> RecordKey:
        """Write a record of this node; None deletes it."""
        self._version += 1
        key = RecordKey(kind, record_id, self._own_id)
        self.view.merge([Record(key, self._version, value)], now)
        return key

    def take(self, messages: Iterable[pb.Record], now: float) -> list[Record]:
        """Merge records that a peer sent. Returns the changes."""
        changed: list[Record] = []
        for message in messages:
            owner = message.owner
            incarnation = self._incarnation_of(owner)
            if owner == self._own_id or message.version // VERSIONS_PER_INCARNATION != incarnation:
                continue
            if message.deleted and not 0 <= message.deleted_s <= TOMBSTONE_S:
                continue
            key = key_of(message)
            held = self.view.get(key)
            if held is not None and held.version >= message.version:
                continue  # the same record comes with several messages
            try:
                record = unread_record(message) if self._has_room(key, message) else record_from_proto(message)
            except TransportError:  # a newer protocol may have records that this version cannot read
                continue
            changed += self.view.merge([record], now - message.deleted_s)
        return changed

    def message(self, key: RecordKey, now: float) -> pb.Record | None:
        """A record in the form in which it is sent to peers."""
        record = self.view.get(key)
        return None if record is None else self._message(record, now)

    def messages_of(self, owner: str, now: float) -> list[pb.Record]:
        """All records of an owner, deletions included."""
        return [self._message(record, now) for record in self.view.of_owner(owner)]

    def differs(self, summary: pb.OwnerSummary) -> tuple[bool, bool]:
        """(whether this node has news of the owner, whether the other side has), by the other side's summary."""
        if self.view.sum_of(summary.owner) == summary.digest:
            return False, False
        newest = self.view.newest_of(summary.owner)
        return newest >= summary.newest, newest <= summary.newest

    @property
    def telemetry(self) -> Readings:
        """The latest telemetry of each living peer and of this node."""
        return Readings(self.readings)

    def take_reading(self, message: pb.Telemetry) -> None:
        """Store the telemetry of another living peer as it came, if it is newer. A reading that leaves out hops gets
        those that are stored."""
        peer_id = message.peer_id
        held = self.readings.get(peer_id)
        if self._incarnation_of(peer_id) is None or (held is not None and held.sequence >= message.sequence):
            return
        if message.keeps_hops:
            message = completed(message, None if held is None else self.reading_of(peer_id), self._is_alive)
        data = message.SerializeToString()
        content = Unread(data, _telemetry) if len(data) <= MAX_READING_BYTES else telemetry_from_proto(message)
        self.readings[peer_id] = Reading(message.sequence, message.keys_digest, content)

    def take_telemetry(self, reading: Telemetry) -> None:
        """Store this node's own telemetry if it is newer."""
        held = self.readings.get(reading.peer_id)
        if held is None or held.sequence < reading.sequence:
            self.readings[reading.peer_id] = Reading(reading.sequence, reading.keys_digest, reading)

    def reading_of(self, peer_id: str) -> pb.Telemetry:
        """The stored telemetry of a peer, in the form in which it is sent to peers."""
        content = self.readings[peer_id].content
        return pb.Telemetry.FromString(content.data) if isinstance(content, Unread) else telemetry_to_proto(content)

    def forget(self, peer_id: str) -> list[Record]:
        """Drop everything that a peer wrote. Returns its records that were in force."""
        self.readings.pop(peer_id, None)
        return self.view.drop_owner(peer_id)

    def _is_alive(self, peer_id: str) -> bool:
        return peer_id == self._own_id or self._incarnation_of(peer_id) is not None

    def _has_room(self, key: RecordKey, message: pb.Record) -> bool:
        """Whether the record may be kept as it came, in place of the version that is held."""
        held = (one.content for one in self.view.of_owner(key.owner) if one.key != key)
        num_bytes = sum(len(content.data) for content in held if isinstance(content, Unread))
        return num_bytes + message.ByteSize() <= MAX_AS_SENT_BYTES

    def _message(self, record: Record, now: float) -> pb.Record:
        deleted_at = self.view.deleted_at(record.key)
        return record_to_proto(record, 0.0 if deleted_at is None else now - deleted_at)


def _telemetry(data: bytes) -> Telemetry:
    return telemetry_from_proto(pb.Telemetry.FromString(data))
