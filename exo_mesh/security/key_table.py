"""The stored form of API keys, and the merging of two peers' tables. Pure.

A table has one entry per id: a key, or its revocation. An id never gets another key, and a revocation is never undone,
so tables merge in any order to the same result, without comparing clocks.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from exo_mesh.domain.fields import NotSent

MAX_KEYS = 1000
MAX_REVOKED = 1000
"""Most revocations that are remembered; beyond that the oldest is dropped. They never expire: a peer may have been away
for a year, and a board without a battery starts in 1970."""

MAX_NAME = 40
"""Characters of the name of a key."""

_ID = re.compile(r"[0-9a-f]{8}")
_SALT = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)?")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")

KeysById = Mapping[str, "ApiKey"]


class Role(StrEnum):
    """The permissions of a key. ADMIN includes USE."""

    USE = "use"
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        return self is Role.ADMIN or self is needed


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key. The secret part has 256 random bits, so a fast hash is as safe as a slow one.

    created: a date. revoked: when, in UTC; a revoked key has neither salt nor digest and matches nothing. name: for
    people only, given when the key is made; tables that differ only in names are equal, because older peers keep none.
    """

    id: str
    role: Annotated[Role, NotSent()]  # exo_mesh/wire/key_codec.py sends it, but for a revoked key
    salt: str
    digest: str
    created: str = ""
    revoked: str = ""
    name: str = field(default="", compare=False)

    def fits(self, secret: str) -> bool:
        """Whether this is the secret part of the key. Takes constant time."""
        return hmac.compare_digest(self.digest, secret_digest(self.salt, secret))

    @property
    def is_well_formed(self) -> bool:
        """Whether this looks like an entry written by exo-mesh; an entry that a peer sent may not."""
        if not _ID.fullmatch(self.id) or not is_key_name(self.name):
            return False
        if self.revoked:
            return self == revoked_key(self.id, self.revoked) and bool(_TIME.fullmatch(self.revoked))
        parts = ((_SALT, self.salt), (_DIGEST, self.digest), (_DATE, self.created))
        return all(pattern.fullmatch(text) for pattern, text in parts)


def is_key_name(name: str) -> bool:
    """Whether a key may have this name: at most MAX_NAME printable characters."""
    return len(name) <= MAX_NAME and name.isprintable() and name == name.strip()


def revoked_key(key_id: str, at: str) -> ApiKey:
    """The entry that replaces a revoked key."""
    return ApiKey(key_id, Role.USE, "", "", revoked=at)


def secret_digest(salt: str, secret: str) -> str:
    """Salted SHA-256 of the secret part of a key, in hex."""
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()


def merge(*tables: Iterable[ApiKey]) -> dict[str, ApiKey]:
    """Merges tables. A revocation wins over the key; at most MAX_KEYS keys and MAX_REVOKED revocations are kept."""
    found: dict[str, ApiKey] = {}
    for table in tables:
        for key in table:
            held = found.get(key.id)
            found[key.id] = key if held is None else max(held, key, key=_rank)
    return _bounded(found)


def live(table: KeysById) -> dict[str, ApiKey]:
    """The valid keys."""
    return {key_id: key for key_id, key in table.items() if not key.revoked}


def missing(table: KeysById, other: KeysById) -> list[ApiKey]:
    """The entries of `table` that `other` lacks or has with another content."""
    return [key for key_id, key in table.items() if other.get(key_id) != key]


def table_digest(table: KeysById) -> int:
    """64 bits over all entries, never 0. Equal tables have equal digests on every peer."""
    text = json.dumps(sorted(_without_name(key) for key in table.values()), separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) or 1


def _without_name(key: ApiKey) -> tuple[str, ...]:
    """The fields that every version knows, in their order."""
    return astuple(replace(key, name=""))[:-1]


def _rank(key: ApiKey) -> tuple[object, ...]:
    return (bool(key.revoked), *astuple(key))


def _bounded(table: dict[str, ApiKey]) -> dict[str, ApiKey]:
    if len(table) <= min(MAX_KEYS, MAX_REVOKED):
        return table
    valid = sorted(live(table).values(), key=lambda key: (key.created, key.id))
    revoked = sorted((key for key in table.values() if key.revoked), key=lambda key: (key.revoked, key.id))
    return {key.id: key for key in (*valid[:MAX_KEYS], *revoked[-MAX_REVOKED:])}
