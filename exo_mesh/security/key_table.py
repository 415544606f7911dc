"""API keys as they are kept, and how the tables of two peers become one. Pure.

A table has one entry for each id: a key, or the note that it was revoked. An id stands for one key for ever, and a
revocation is never taken back, so tables merge in any order to the same result, and no clock decides what holds.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from enum import StrEnum

MAX_KEYS = 1000
MAX_REVOKED = 1000
"""Revocations that are remembered; beyond that the oldest is forgotten. They never expire: a peer may have been away
for a year, and the clock of a board without a battery says 1970."""

_ID = re.compile(r"[0-9a-f]{8}")
_SALT = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)?")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")

KeysById = Mapping[str, "ApiKey"]


class Role(StrEnum):
    """What a key is good for. ADMIN may do all that USE may."""

    USE = "use"
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        return self is Role.ADMIN or self is needed


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept. The secret part has 256 random bits, so a fast hash is as good as a slow one.

    created: a date. revoked: when, in UTC; such a key has neither salt nor digest, and fits nothing.
    """

    id: str
    role: Role
    salt: str
    digest: str
    created: str = ""
    revoked: str = ""

    def fits(self, secret: str) -> bool:
        """Is this the secret part? Takes the same time whether it is or not."""
        return hmac.compare_digest(self.digest, secret_digest(self.salt, secret))

    @property
    def is_well_formed(self) -> bool:
        """Whether it looks like an entry that this program wrote. What a peer sent may not."""
        if not _ID.fullmatch(self.id):
            return False
        if self.revoked:
            return self == revoked_key(self.id, self.revoked) and bool(_TIME.fullmatch(self.revoked))
        parts = ((_SALT, self.salt), (_DIGEST, self.digest), (_DATE, self.created))
        return all(pattern.fullmatch(text) for pattern, text in parts)


def revoked_key(key_id: str, at: str) -> ApiKey:
    """What is left of a key that was revoked."""
    return ApiKey(key_id, Role.USE, "", "", revoked=at)


def secret_digest(salt: str, secret: str) -> str:
    """Salted SHA-256 of the secret part of a key, in hex."""
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()


def merge(*tables: Iterable[ApiKey]) -> dict[str, ApiKey]:
    """One table of several. A revocation wins over the key; at most MAX_KEYS keys and MAX_REVOKED revocations stay."""
    found: dict[str, ApiKey] = {}
    for table in tables:
        for key in table:
            held = found.get(key.id)
            found[key.id] = key if held is None else max(held, key, key=_rank)
    return _bounded(found)


def live(table: KeysById) -> dict[str, ApiKey]:
    """The keys that are valid."""
    return {key_id: key for key_id, key in table.items() if not key.revoked}


def missing(table: KeysById, other: KeysById) -> list[ApiKey]:
    """Entries of `table` that `other` does not have like this."""
    return [key for key_id, key in table.items() if other.get(key_id) != key]


def table_digest(table: KeysById) -> int:
    """64 bits over all entries, never 0. Equal tables have equal digests at every peer."""
    text = json.dumps(sorted(astuple(key) for key in table.values()), separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) or 1


def _rank(key: ApiKey) -> tuple[object, ...]:
    return (bool(key.revoked), *astuple(key))


def _bounded(table: dict[str, ApiKey]) -> dict[str, ApiKey]:
    if len(table) <= min(MAX_KEYS, MAX_REVOKED):
        return table
    valid = sorted(live(table).values(), key=lambda key: (key.created, key.id))
    revoked = sorted((key for key in table.values() if key.revoked), key=lambda key: (key.revoked, key.id))
    return {key.id: key for key in (*valid[:MAX_KEYS], *revoked[-MAX_REVOKED:])}
