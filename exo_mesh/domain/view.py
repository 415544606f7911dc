"""What the mesh agrees on: single-writer versioned records, merged in any order to the same result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NamedTuple

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan

TOMBSTONE_S = 60.0
"""How long a deletion is remembered: much longer than a live peer can lag behind (it is dead after 3 s)."""

MAX_RECORDS_PER_OWNER = 256
"""An owner has one peer record and an instance record per model it placed; more is a fault or an attack."""


class InstanceState(StrEnum):
    """loading: its stages are being started. ready: it serves. failed: it is being taken down."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """A placed model as its owner describes it; endpoints ("host:port") and pids are per stage, in ring order.

    adopted: the ballot by which the present owner took it over; its runners go on under the ballot of their plan.
    """

    plan: Plan
    state: InstanceState
    endpoints: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    reason: str = ""
    adopted: Ballot = NO_BALLOT

    @property
    def ballot(self) -> Ballot:
        """The ballot in force."""
        return max(self.plan.ballot, self.adopted)


class RecordKey(NamedTuple):
    """kind is "peer" or "instance"; only `owner` writes records with its name in the key."""

    kind: str
    id: str
    owner: str


@dataclass(frozen=True, slots=True)
class Record:
    """One version of one record; `value` is None exactly when it is deleted."""

    key: RecordKey
    version: int
    value: PeerInfo | InstanceInfo | None

    @property
    def deleted(self) -> bool:
        return self.value is None


class View:
    """The records a peer holds. A higher version of a key replaces a lower one, so merging commutes and repeats
    change nothing. Times are seconds of any monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._records: dict[RecordKey, Record] = {}
        self._deleted_at: dict[RecordKey, float] = {}

    def merge(self, records: Iterable[Record], now: float) -> list[Record]:
        """Take over what is newer; answer what changed. Owners over MAX_RECORDS_PER_OWNER get no new keys."""
        changed = []
        for record in records:
            held = self._records.get(record.key)
            if held is not None and held.version >= record.version:
                continue
            if held is None and self._count(record.key.owner) >= MAX_RECORDS_PER_OWNER:
                continue
            self._records[record.key] = record
            if record.deleted:
                self._deleted_at[record.key] = now
            else:
                self._deleted_at.pop(record.key, None)
            changed.append(record)
        return changed

    def drop_owner(self, owner: str) -> list[Record]:
        """Forget all records of an owner that is gone; answer the live ones among them."""
        gone = [record for key, record in self._records.items() if key.owner == owner]
        for record in gone:
            del self._records[record.key]
            self._deleted_at.pop(record.key, None)
        return [record for record in gone if not record.deleted]

    def expire(self, now: float) -> None:
        """Forget deletions older than TOMBSTONE_S."""
        for key in [key for key, at in self._deleted_at.items() if now - at > TOMBSTONE_S]:
            del self._deleted_at[key], self._records[key]

    def get(self, key: RecordKey) -> Record | None:
        return self._records.get(key)

    def versions(self) -> dict[RecordKey, int]:
        """What this view holds, deletions included."""
        return {key: record.version for key, record in self._records.items()}

    def newer_than(self, have: Mapping[RecordKey, int]) -> list[Record]:
        """Records, deletions included, that somebody with the versions `have` lacks."""
        return [record for key, record in self._records.items() if have.get(key, -1) < record.version]

    def wanted_from(self, have: Mapping[RecordKey, int], owners: Collection[str]) -> list[RecordKey]:
        """Keys of the given owners of which somebody with the versions `have` holds a newer version."""
        return [
            key
            for key, version in have.items()
            if key.owner in owners and (key not in self._records or self._records[key].version < version)
        ]

    def peers(self) -> list[PeerInfo]:
        """Peer records, by id."""
        values = [record.value for record in self._live() if isinstance(record.value, PeerInfo)]
        return sorted(values, key=lambda peer: peer.id)

    def instances(self) -> list[tuple[str, InstanceInfo]]:
        """(owner, instance), one for each instance id: the one with the highest ballot, by instance id."""
        best: dict[str, tuple[str, InstanceInfo]] = {}
        for record in self._live():
            if isinstance(record.value, InstanceInfo):
                held = best.get(record.key.id)
                if held is None or (record.value.ballot, record.key.owner) > (held[1].ballot, held[0]):
                    best[record.key.id] = (record.key.owner, record.value)
        return [best[instance_id] for instance_id in sorted(best)]

    def plans_of(self, instance_id: str) -> set[Ballot]:
        """Ballots of the plans that living owners say make up this instance; in order there is one at most."""
        return {
            record.value.plan.ballot
            for record in self._live()
            if record.key.id == instance_id and isinstance(record.value, InstanceInfo)
        }

    def digest(self) -> str:
        """SHA-256 over all live records; equal views have equal digests on every machine."""
        rows = [[*record.key, record.version, asdict(record.value)] for record in self._live() if record.value]
        rows.sort(key=lambda row: row[:3])
        return hashlib.sha256(json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _live(self) -> list[Record]:
        return [record for record in self._records.values() if not record.deleted]

    def _count(self, owner: str) -> int:
        return sum(1 for key in self._records if key.owner == owner)
