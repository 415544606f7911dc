"""Stores the records of the mesh and enforces which records this peer may accept and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.device import Telemetry
from exo_mesh.domain.view import TOMBSTONE_S, ForeignInfo, Record, RecordKey, RecordValue, Unread, View
from exo_mesh.mesh.membership.fences import Fences
from exo_mesh.mesh.membership.messages import OwnerSummary
from exo_mesh.mesh.membership.peers import VERSIONS_PER_INCARNATION
from exo_mesh.wire.control_codec import encoded
from exo_mesh.wire.readings import Reading, completed

MAX_AS_SENT_BYTES = 512 * 1024
"""Most bytes per owner that are kept as received. A peer's own record with 1,024 models has about 100 KiB. Beyond that
a record is read at once, because what is read is bounded."""

MAX_READING_BYTES = 16 * 1024
"""Longest telemetry reading that is kept as received; a longer one is read at once, and passed on without fields
unknown here."""


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
        self.view.merge([encoded(Record(key, self._version, value))], now)
        return key

    def take(self, records: Iterable[Record], now: float) -> list[Record]:
        """Merge records that a peer sent. Returns the changes."""
        changed: list[Record] = []
        for record in records:
            owner, version = record.key.owner, record.version
            if owner == self._own_id or version // VERSIONS_PER_INCARNATION != self._incarnation_of(owner):
                continue
            if not 0 <= record.deleted_s <= TOMBSTONE_S:
                continue
            held = self.view.get(record.key)
            if held is not None and held.version >= version:
                continue  # the same record comes with several messages
            if not self._has_room(record):
                if isinstance(record.value, ForeignInfo):
                    continue
                record = replace(record, content=record.value)
            changed += self.view.merge([record], now)
        return changed

    def get(self, key: RecordKey, now: float) -> Record | None:
        """A record as it is sent to peers."""
        record = self.view.get(key)
        return None if record is None else self._aged(record, now)

    def of_owner(self, owner: str, now: float) -> list[Record]:
        """All records of an owner as they are sent to peers, deletions included."""
        return [self._aged(record, now) for record in self.view.of_owner(owner)]

    def differs(self, summary: OwnerSummary) -> tuple[bool, bool]:
        """(whether this node has news of the owner, whether the other side has), by the other side's summary."""
        if self.view.sum_of(summary.owner) == summary.digest:
            return False, False
        newest = self.view.newest_of(summary.owner)
        return newest >= summary.newest, newest <= summary.newest

    @property
    def telemetry(self) -> Readings:
        """The latest telemetry of each living peer and of this node."""
        return Readings(self.readings)

    def take_reading(self, reading: Reading) -> None:
        """Store the telemetry of another living peer as it came, if it is newer. A reading that leaves out hops gets
        those that are stored."""
        held = self.readings.get(reading.peer_id)
        is_known = held is not None and held.sequence >= reading.sequence
        if self._incarnation_of(reading.peer_id) is None or is_known:
            return
        if reading.keeps_hops:
            reading = completed(reading, held, self._is_alive)
        if reading.num_bytes > MAX_READING_BYTES:
            reading = msgspec.structs.replace(reading, content=reading.value)
        self.readings[reading.peer_id] = reading

    def take_telemetry(self, telemetry: Telemetry) -> None:
        """Store this node's own telemetry if it is newer."""
        held = self.readings.get(telemetry.peer_id)
        if held is None or held.sequence < telemetry.sequence:
            self.readings[telemetry.peer_id] = Reading(
                telemetry.peer_id, telemetry.sequence, telemetry.keys_digest, telemetry
            )

    def forget(self, peer_id: str) -> list[Record]:
        """Drop everything that a peer wrote. Returns its records that were in force."""
        self.readings.pop(peer_id, None)
        return self.view.drop_owner(peer_id)

    def _is_alive(self, peer_id: str) -> bool:
        return peer_id == self._own_id or self._incarnation_of(peer_id) is not None

    def _has_room(self, record: Record) -> bool:
        """Whether the record may be kept as it came, in place of the version that is held."""
        others = (one.content for one in self.view.of_owner(record.key.owner) if one.key != record.key)
        sizes = [len(one.data) for one in (record.content, *others) if isinstance(one, Unread)]
        return not isinstance(record.content, Unread) or sum(sizes) <= MAX_AS_SENT_BYTES

    def _aged(self, record: Record, now: float) -> Record:
        deleted_at = self.view.deleted_at(record.key)
        return record if deleted_at is None else replace(record, deleted_s=now - deleted_at)
