"""The records that the mesh agrees on: versioned, with a single writer each, merged in any order to the same result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.download import DownloadInfo
from exo_mesh.domain.fields import Absent, Else, SentAs, Size
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan
from exo_mesh.domain.shared_settings import SharedSettings

TOMBSTONE_S = 60.0
"""How long a deletion is remembered: much longer than a live peer can lag behind (it is dead after 3 s)."""

MAX_RECORDS_PER_OWNER = 256
"""Most records of one owner. An owner has one peer record, an instance record per model that it placed, and some
downloads and cards; more is a bug or an attack."""

MAX_DOWNLOADS_PER_OWNER = 32
"""Most download records among them; a peer fetches a few models at a time, and removes records of ended downloads."""

MAX_CARDS_PER_OWNER = 32
"""Most custom model cards among them. All cards of one owner take at most a quarter of a message."""

MAX_CARD_BYTES = 4 * 1024
"""Longest card as TOML. The longest card that we ship has less than 1 KiB."""

MAX_FOREIGN_PER_OWNER = 16
MAX_FOREIGN_BYTES = 16 * 1024
"""Most records of unknown kinds of one owner, all kinds together, and the longest of them in bytes."""

_MAX_OF_KIND = {"download": MAX_DOWNLOADS_PER_OWNER, "card": MAX_CARDS_PER_OWNER, "settings": 1}


class InstanceState(StrEnum):
    """The state of an instance. loading: its stages are starting. ready: it serves. failed: it is being removed."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class InstanceInfo(msgspec.Struct, frozen=True):
    """A placed model as its owner describes it; endpoints ("host:port") and pids are per stage, in ring order.

    adopted: the ballot by which the current owner took it over; its runners keep the ballot of their plan. is_auto: the
    mesh placed it by itself, because the requests of its model had to wait; it is given back when they no longer do.
    """

    plan: Plan
    state: Annotated[InstanceState, Else(InstanceState.LOADING)]
    endpoints: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    reason: str = ""
    adopted: Annotated[Ballot, Absent(NO_BALLOT)] = NO_BALLOT
    is_auto: Annotated[bool, SentAs("automatic")] = False

    @property
    def ballot(self) -> Ballot:
        """The ballot in force."""
        return max(self.plan.ballot, self.adopted)


class CardInfo(msgspec.Struct, frozen=True):
    """A custom model card, as the text of its TOML file; readers validate it."""

    toml: Annotated[str, Size(MAX_CARD_BYTES)]


class ForeignInfo(msgspec.Struct, frozen=True):
    """A record that this version cannot read, as the received bytes: of a kind that only newer versions know, or beyond
    a bound. It is kept to be passed on."""

    content: bytes


class RecordKey(NamedTuple):
    """The identity of a record. kind: one of KINDS, or a newer version's. Only `owner` writes records with its id."""

    kind: str
    id: str
    owner: str


RecordValue = PeerInfo | InstanceInfo | DownloadInfo | CardInfo | SharedSettings | ForeignInfo

KINDS = frozenset({"peer", "instance", "download", "card", "settings"})
"""Kinds of records that this version reads."""


T = TypeVar("T")


class Unread(Generic[T]):
    """What a peer sent, as it came: it is passed on unchanged, and read when somebody first looks at `value`."""

    __slots__ = ("_read", "_value", "data")

    def __init__(self, data: bytes, read: Callable[[bytes], T]) -> None:
        self.data = data
        self._read: Callable[[bytes], T] | None = read
        self._value: T

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unread) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    @property
    def value(self) -> T:
        if self._read is not None:
            self._value, self._read = self._read(self.data), None
        return self._value


class Record(msgspec.Struct, frozen=True):
    """One version of one record. content: None exactly if the record is deleted. deleted_s: seconds since the deletion,
    when the record was sent."""

    key: RecordKey
    version: int
    content: RecordValue | Unread[RecordValue] | None
    deleted_s: float = 0.0

    @property
    def value(self) -> RecordValue | None:
        return self.content.value if isinstance(self.content, Unread) else self.content

    @property
    def deleted(self) -> bool:
        return self.content is None


class View:
    """The records that a peer holds. A higher version of a key replaces a lower one, so merging is commutative and
    idempotent. Times are seconds of any monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[RecordKey, Record]] = {}
        self._deleted_at: dict[RecordKey, float] = {}
        self._sums: dict[str, int] = {}
        self.sum = 0
        self.cards_version = 0
        """Rises whenever a card record changes."""
        self.settings_version = 0
        """Rises whenever a record of shared settings changes."""

    def merge(self, records: Iterable[Record], now: float) -> list[Record]:
        """Adopts newer records and returns the changed ones. Owners over MAX_RECORDS_PER_OWNER get no new keys."""
        changed = []
        for record in records:
            owned = self._owners.setdefault(record.key.owner, {})
            held = owned.get(record.key)
            if held is not None and held.version >= record.version:
                continue
            if held is None and _is_full(owned, record.key.kind):
                continue
            owned[record.key] = record
            self._count(record)
            self._add(held, record)
            if record.deleted:
                self._deleted_at[record.key] = now - record.deleted_s
            else:
                self._deleted_at.pop(record.key, None)
            changed.append(record)
        return changed

    def drop_owner(self, owner: str) -> list[Record]:
        """Removes all records of an owner that is gone, and returns the live ones among them."""
        gone = list(self._owners.pop(owner, {}).values())
        for record in gone:
            self._deleted_at.pop(record.key, None)
            self._count(record)
        self.sum ^= self._sums.pop(owner, 0)
        return [record for record in gone if not record.deleted]

    def expire(self, now: float) -> None:
        """Removes deletions older than TOMBSTONE_S."""
        for key in [key for key, at in self._deleted_at.items() if now - at > TOMBSTONE_S]:
            del self._deleted_at[key], self._owners[key.owner][key]

    def deleted_at(self, key: RecordKey) -> float | None:
        """When a record was deleted; None if it is not, or if the deletion has expired."""
        return self._deleted_at.get(key)

    def get(self, key: RecordKey) -> Record | None:
        return self._owners.get(key.owner, {}).get(key)

    def versions(self) -> dict[RecordKey, int]:
        """The version of every record that this view holds, deletions included."""
        return {key: record.version for owned in self._owners.values() for key, record in owned.items()}

    def of_owner(self, owner: str) -> list[Record]:
        """All records of an owner, deletions included."""
        return list(self._owners.get(owner, {}).values())

    def newest_of(self, owner: str) -> int:
        """The highest version held of an owner's records, deletions included; 0 if there is none."""
        return max((record.version for record in self._owners.get(owner, {}).values()), default=0)

    def sum_of(self, owner: str) -> int:
        """64 bits over keys and versions of an owner's live records; `sum` covers all owners. Equal views have equal
        sums, whichever deletions they have already expired. Cheap, unlike `digest`."""
        return self._sums.get(owner, 0)

    def peers(self) -> list[PeerInfo]:
        """Peer records, by id."""
        values = [record.value for record in self._live() if isinstance(record.value, PeerInfo)]
        return sorted(values, key=lambda peer: peer.id)

    def instances(self) -> list[tuple[str, InstanceInfo]]:
        """(owner, instance) per instance id, sorted by id: the record with the highest ballot."""
        best: dict[str, tuple[str, InstanceInfo]] = {}
        for record in self._live():
            if isinstance(record.value, InstanceInfo):
                held = best.get(record.key.id)
                if held is None or (record.value.ballot, record.key.owner) > (held[1].ballot, held[0]):
                    best[record.key.id] = (record.key.owner, record.value)
        return [best[instance_id] for instance_id in sorted(best)]

    def records_of_instances(self) -> list[tuple[str, InstanceInfo]]:
        """(owner, instance) of every live record: several per instance while its ownership is being settled."""
        return [(one.key.owner, one.value) for one in self._live() if isinstance(one.value, InstanceInfo)]

    def downloads(self) -> list[tuple[str, DownloadInfo]]:
        """(owner, download), by model and owner."""
        found = [(one.key.owner, one.value) for one in self._live() if isinstance(one.value, DownloadInfo)]
        return sorted(found, key=lambda one: (one[1].model, one[0]))

    def cards(self) -> list[tuple[str, str, CardInfo]]:
        """(id of the model, owner, card) of every live card record, sorted."""
        live = self._live()
        found = [(one.key.id, one.key.owner, one.value) for one in live if isinstance(one.value, CardInfo)]
        return sorted(found, key=lambda one: one[:2])

    def shared_settings(self) -> list[tuple[str, SharedSettings]]:
        """(owner, shared settings) of every live settings record, by owner."""
        found = [(one.key.owner, one.value) for one in self._live() if isinstance(one.value, SharedSettings)]
        return sorted(found, key=lambda one: one[0])

    def digest(self) -> str:
        """SHA-256 over keys and versions of all live records but downloads. Equal views have equal digests everywhere.

        Views digest alike in every version of exo-mesh: a record has a single writer, so one version of it has one
        content. Downloads are left out. They change twice a second, so no two peers would ever show the same digest.
        """
        rows = sorted([*one.key, one.version] for one in self._live() if one.key.kind != "download")
        return hashlib.sha256(json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _live(self) -> list[Record]:
        return [record for owned in self._owners.values() for record in owned.values() if not record.deleted]

    def _count(self, record: Record) -> None:
        self.cards_version += record.key.kind == "card"
        self.settings_version += record.key.kind == "settings"

    def _add(self, held: Record | None, record: Record) -> None:
        change = _hash(record) if held is None else _hash(held) ^ _hash(record)
        self._sums[record.key.owner] = self._sums.get(record.key.owner, 0) ^ change
        self.sum ^= change


def _is_full(owned: dict[RecordKey, Record], kind: str) -> bool:
    """Whether an owner may have no further record of this kind. Deletions count until they expire."""
    if len(owned) >= MAX_RECORDS_PER_OWNER:
        return True
    if kind not in KINDS:
        return sum(key.kind not in KINDS for key in owned) >= MAX_FOREIGN_PER_OWNER
    most = _MAX_OF_KIND.get(kind)
    return most is not None and sum(key.kind == kind for key in owned) >= most


def _hash(record: Record) -> int:
    if record.deleted:
        return 0
    text = json.dumps([*record.key, record.version], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
