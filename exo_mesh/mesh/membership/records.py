"""Stores the records of the mesh and enforces which records this peer may accept and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from exo_mesh.domain.device import Telemetry
from exo_mesh.domain.view import TOMBSTONE_S, Record, RecordKey, RecordValue, View
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.fences import Fences
from exo_mesh.mesh.membership.peers import VERSIONS_PER_INCARNATION
from exo_mesh.mesh.membership.short_readings import completed
from exo_mesh.wire.control_codec import (
    record_from_proto,
    record_to_proto,
    telemetry_from_proto,
    telemetry_to_proto,
)
from exo_mesh.wire.proto import control_pb2 as pb

MAX_AS_SENT_BYTES = 512 * 1024
"""Most bytes per owner that are passed on unchanged. A peer's own record with 1,024 models has about 100 KiB."""

MAX_READING_BYTES = 16 * 1024
"""Longest telemetry reading that is passed on unchanged; a longer one is re-encoded without fields unknown here."""


class Records:
    """Holds the view, this node's own records, the telemetry of all peers, and the deletions of instances. Deletions
    have no owner: they outlive the peer that was asked to delete.

    Only records of living owners in their present incarnation are accepted, so a dead peer's records do not return.
    """

    def __init__(self, own_id: str, own_incarnation: int, incarnation_of: Callable[[str], int | None]) -> None:
        self.view = View()
        self.fences = Fences()
        self.telemetry: dict[str, Telemetry] = {}
        self._as_sent: dict[str, dict[RecordKey, pb.Record]] = {}
        """By owner: records with fields that this version does not know. They are passed on unchanged."""
        self._readings: dict[str, pb.Telemetry] = {}
        """The same for telemetry readings; only small ones."""
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
            try:
                record = record_from_proto(message)
            except TransportError:  # a newer protocol may have records that this version cannot read
                continue
            if merged := self.view.merge([record], now - message.deleted_s):
                changed += merged
                self._keep(record, message)
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

    def take_reading(self, message: pb.Telemetry) -> None:
        """Store a telemetry reading; unchanged if it has fields that this version does not know. A reading that leaves
        out hops gets those that are stored."""
        held = self.telemetry.get(message.peer_id)
        if held is not None and held.sequence >= message.sequence:
            return  # the same one comes with several messages; to decode it is much of the work of an idle node
        if message.keeps_hops:
            message = completed(message, None if held is None else self.reading_of(held.peer_id), self._is_alive)
        reading = telemetry_from_proto(message)
        if self.take_telemetry(reading):
            self._readings.pop(reading.peer_id, None)
            if message.ByteSize() <= MAX_READING_BYTES and telemetry_to_proto(reading) != message:
                self._readings[reading.peer_id] = message

    def take_telemetry(self, reading: Telemetry) -> bool:
        """Store the telemetry of a living peer if it is newer."""
        held = self.telemetry.get(reading.peer_id)
        is_newer = self._is_alive(reading.peer_id) and (held is None or held.sequence < reading.sequence)
        if is_newer:
            self.telemetry[reading.peer_id] = reading
        return is_newer

    def reading_of(self, peer_id: str) -> pb.Telemetry:
        """The stored telemetry of a peer, in the form in which it is sent to peers."""
        as_sent = self._readings.get(peer_id)
        return telemetry_to_proto(self.telemetry[peer_id]) if as_sent is None else as_sent

    def forget(self, peer_id: str) -> list[Record]:
        """Drop everything that a peer wrote. Returns its records that were in force."""
        self.telemetry.pop(peer_id, None)
        self._readings.pop(peer_id, None)
        self._as_sent.pop(peer_id, None)
        return self.view.drop_owner(peer_id)

    def _is_alive(self, peer_id: str) -> bool:
        return peer_id == self._own_id or self._incarnation_of(peer_id) is not None

    def _keep(self, record: Record, message: pb.Record) -> None:
        """Keep the received message if it has more than this version would send, so that a peer with a newer version
        gets all of it."""
        held = self._as_sent.setdefault(record.key.owner, {})
        held.pop(record.key, None)
        if record.deleted or record_to_proto(record) == message:
            return
        if message.ByteSize() + sum(one.ByteSize() for one in held.values()) <= MAX_AS_SENT_BYTES:
            held[record.key] = message

    def _message(self, record: Record, now: float) -> pb.Record:
        as_sent = self._as_sent.get(record.key.owner, {}).get(record.key)
        if as_sent is not None and as_sent.version == record.version and not record.deleted:
            return as_sent
        deleted_at = self.view.deleted_at(record.key)
        return record_to_proto(record, 0.0 if deleted_at is None else now - deleted_at)
