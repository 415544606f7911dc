"""Keys of the HTTP API: made once, shown once, kept as salted hashes in `api_keys.toml` in the node's home.

As soon as the file exists the API wants a key, even if there is none in it.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from exo_mesh.errors import InputError

FILE_NAME = "api_keys.toml"
MAX_KEYS = 1000

_TEXT = re.compile(r"xm-([0-9a-f]{8})-([A-Za-z0-9_-]{43})")
_log = logging.getLogger(__name__)


class Role(StrEnum):
    """What a key is good for. ADMIN may do all that USE may."""

    USE = "use"
    ADMIN = "admin"

    def covers(self, needed: Role) -> bool:
        return self is Role.ADMIN or self is needed


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept. The secret part has 256 random bits, so a fast hash is as good as a slow one."""

    id: str
    role: Role
    salt: str
    digest: str
    created: str = ""

    def fits(self, secret: str) -> bool:
        """Is this the secret part? Takes the same time whether it is or not."""
        return hmac.compare_digest(self.digest, _digest(self.salt, secret))


_NOBODY = ApiKey("", Role.USE, "00" * 16, "00" * 32)
"""What an unknown id is compared with, so that time does not tell which ids exist."""


def new_key(role: Role, now: datetime.datetime) -> tuple[str, ApiKey]:
    """(the text to give away, what to keep of it)."""
    key_id, secret, salt = secrets.token_hex(4), secrets.token_urlsafe(32), secrets.token_hex(16)
    return f"xm-{key_id}-{secret}", ApiKey(key_id, role, salt, _digest(salt, secret), now.date().isoformat())


class KeyFile:
    """The keys in force. Changes of the file are noticed at the next `check`; no restart is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._keys: dict[str, ApiKey] = {}
        self._configured = False

    @property
    def configured(self) -> bool:
        """Has there been a file since the start? Removing it does not open the API of a running node."""
        self._refresh()
        return self._configured

    def check(self, text: str) -> ApiKey | None:
        """The key that a caller shows; None if it is none of ours."""
        self._refresh()
        match = _TEXT.fullmatch(text)
        known = self._keys.get(match[1], _NOBODY) if match else _NOBODY
        return known if known.fits(match[2] if match else "") else None

    def read(self) -> list[ApiKey]:
        """All keys in the file. Raises InputError if it cannot be understood."""
        try:
            tables = tomllib.loads(self.path.read_text(encoding="ascii"))
            return [_from_table(key_id, table) for key_id, table in tables.items()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise InputError(f"{self.path}: not a file of API keys: {type(exc).__name__}") from exc

    def write(self, keys: Iterable[ApiKey]) -> None:
        """Replace the file; only its owner may read it. Raises OSError."""
        text = "# Keys of the HTTP API; see `exo-mesh key`. What is here does not give access.\n"
        for key in keys:
            text += f'\n[{key.id}]\nrole = "{key.role}"\nsalt = "{key.salt}"\nsha256 = "{key.digest}"\n'
            text += f'created = "{key.created}"\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(text)
        draft.replace(self.path)

    def _refresh(self) -> None:
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        except FileNotFoundError:
            stamp = None
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._configured = self._configured or stamp is not None
        try:
            self._keys = {key.id: key for key in self.read()}
        except InputError as exc:
            self._keys = {}  # nobody is let in by a file that nobody can read
            _log.error("%s: no key is valid until it is repaired", exc)


def _from_table(key_id: str, table: dict[str, str]) -> ApiKey:
    bytes.fromhex(table["salt"] + table["sha256"])
    if len(table["sha256"]) != 64:
        raise ValueError("a hash has 64 digits")
    return ApiKey(key_id, Role(table["role"]), table["salt"], table["sha256"], table.get("created", ""))


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()
