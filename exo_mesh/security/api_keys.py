"""Manages the keys of the HTTP API: shown once when created, stored as salted hashes in `api_keys.toml` in the node's
home.

Once the file exists, the API requires a key, even if the file is empty.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from exo_mesh.base.printable import quoted
from exo_mesh.base.small_files import exists, read_small
from exo_mesh.errors import InputError
from exo_mesh.security.key_table import MAX_KEYS as MAX_KEYS
from exo_mesh.security.key_table import MAX_NAME, KeysById, is_key_name, live, merge, revoked_key, secret_digest
from exo_mesh.security.key_table import ApiKey as ApiKey
from exo_mesh.security.key_table import Role as Role

FILE_NAME = "api_keys.toml"

_TEXT = re.compile(r"xm-([0-9a-f]{8})-([A-Za-z0-9_-]{43})")
MAX_FILE_BYTES = 2**22
"""Largest file of keys: MAX_KEYS and as many revocations take an eighth of it."""

_HEAD = "# Keys of the HTTP API; see `exo-mesh key`. The hashes in this file give no access.\n"
_log = logging.getLogger(__name__)

_NO_KEY = ApiKey("", Role.USE, "00" * 16, "00" * 32)
"""The key that an unknown id is compared with, so that the duration does not reveal which ids exist."""


def new_key(role: Role, now: datetime.datetime, name: str = "") -> tuple[str, ApiKey]:
    """Returns (the text to hand out, the entry to store). Raises InputError for a name that no key may have."""
    if not is_key_name(name):
        raise InputError(f"name is {quoted(name, 80)}; it must be 1 to {MAX_NAME} printable characters", param="name")
    key_id, secret, salt = secrets.token_hex(4), secrets.token_urlsafe(32), secrets.token_hex(16)
    digest = secret_digest(salt, secret)
    return f"xm-{key_id}-{secret}", ApiKey(key_id, role, salt, digest, now.date().isoformat(), name=name)


def revoke(key_id: str, now: datetime.datetime) -> ApiKey:
    """The entry that replaces a revoked key; now: in UTC."""
    return revoked_key(key_id, f"{now:%Y-%m-%dT%H:%M:%SZ}")


class KeyFile:
    """The valid keys: from the file and from peers. Changes of the file take effect at the next `check`, without a
    restart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._from_peers: dict[str, ApiKey] = {}
        self._in_file: list[ApiKey] | None = []
        self._table: dict[str, ApiKey] = {}
        self._keys: dict[str, ApiKey] = {}
        self._configured = False

    @property
    def configured(self) -> bool:
        """Whether there has been a file since the start. Removing the file does not open the API of a running node."""
        self._refresh()
        return self._configured

    @property
    def table(self) -> KeysById:
        """Every known entry, including revocations. A new mapping after each change."""
        self._refresh()
        return self._table

    def check(self, text: str) -> ApiKey | None:
        """The key that a caller presents; None if it is not valid."""
        self._refresh()
        match = _TEXT.fullmatch(text)
        known = self._keys.get(match[1], _NO_KEY) if match else _NO_KEY
        return known if known.fits(match[2] if match else "") else None

    def refuses(self, key_id: str) -> bool:
        """Whether this id was revoked, also if no key has it. An unreadable file refuses every id."""
        entry = self.table.get(key_id)
        return self._in_file is None or (entry is not None and bool(entry.revoked))

    def has_ended(self, key_id: str, *, is_key: bool) -> bool:
        """Whether a valid id has been revoked since; also if the key is gone from the file, but not while the file is
        unreadable. is_key: only keys have an entry while they are valid."""
        entry = self.table.get(key_id)
        return bool(entry.revoked) if entry is not None else is_key and self._in_file is not None

    def learn(self, received: Iterable[ApiKey]) -> list[ApiKey]:
        """Accept the keys that a peer sent; returns the new ones. They are valid at once; `save` stores them."""
        before = self.table
        self._from_peers = merge(self._from_peers.values(), received)
        self._combine()
        return [key for key_id, key in self._table.items() if before.get(key_id) != key]

    def save(self, keys: Iterable[ApiKey]) -> None:
        """Add entries to the file. Raises OSError, or InputError if the file is invalid. May run in any thread."""
        self.change(lambda held: merge(held, keys).values())

    def add(self, role: Role, now: datetime.datetime, name: str = "") -> tuple[str, ApiKey]:
        """Create a key and store it; returns and raises the same as `new_key`. Raises like `save`, and InputError if
        there are MAX_KEYS."""
        text, key = new_key(role, now, name)

        def with_it(keys: list[ApiKey]) -> list[ApiKey]:
            if sum(not one.revoked for one in keys) >= MAX_KEYS:
                raise InputError(f"there are already {MAX_KEYS} keys; remove one first")
            return [*keys, key]

        self.change(with_it)
        return text, key

    def remove(self, key_id: str, now: datetime.datetime) -> bool:
        """Revoke a key; False if there is no such valid key. Raises like `save`."""
        found = False

        def without_it(keys: list[ApiKey]) -> Iterable[ApiKey]:
            nonlocal found
            found = any(key.id == key_id and not key.revoked for key in keys)
            return merge(keys, [revoke(key_id, now)]).values() if found else keys

        self.change(without_it)
        return found

    def refuse(self, key_id: str, now: datetime.datetime) -> None:
        """Revoke the id of a session, which no key has. Raises like `save`, and InputError if a valid key has it."""

        def without_it(keys: list[ApiKey]) -> Iterable[ApiKey]:
            if key_id in live(merge(keys, self._from_peers.values())):
                raise InputError(f"{key_id} is the id of a key, not of a session", param="id")
            return merge(keys, [revoke(key_id, now)]).values()

        self.change(without_it)

    def change(self, edit: Callable[[list[ApiKey]], Iterable[ApiKey]]) -> None:
        """Replace the entries of the file under a lock against other processes. Raises like `save`, and what `edit`
        raises."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = self.read_all()
            changed = list(edit(held))
            if changed != held:
                self.write(changed)
        finally:
            os.close(lock)

    def read(self) -> list[ApiKey]:
        """The valid keys in the file. Raises InputError if the file is invalid."""
        return [key for key in self.read_all() if not key.revoked]

    def read_all(self) -> list[ApiKey]:
        """Like `read`, including revoked keys."""
        try:
            if not exists(self.path):
                return []
            content = read_small(self.path, MAX_FILE_BYTES, pipe_wait_s=0)
            if len(content) > MAX_FILE_BYTES:
                raise InputError(f"{self.path}: has more than {MAX_FILE_BYTES} bytes")
            tables = tomllib.loads(content.decode("utf-8-sig"))
            return [_from_table(key_id, table) for key_id, table in tables.items()]
        except OSError as exc:
            raise InputError(f"{self.path}: the file of API keys cannot be read: {exc.strerror}") from exc
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise InputError(f"{self.path}: not a valid file of API keys: {type(exc).__name__}") from exc

    def write(self, keys: Iterable[ApiKey]) -> None:
        """Replace the file; only its owner may read it. Raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(_HEAD + "".join(map(_to_table, keys)))
        draft.replace(self.path)

    def _refresh(self) -> None:
        stamp: tuple[int, int, int] | None
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError as exc:  # a missing file leaves the API open; an unreadable one or a link to nothing must not
            is_missing = isinstance(exc, FileNotFoundError) and not self.path.is_symlink()
            stamp = None if is_missing else (0, 0, 0)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._configured = self._configured or stamp is not None
        try:
            self._in_file = self.read_all()
        except InputError as exc:
            self._in_file = None
            _log.error("%s; no API key is valid until the file is repaired", exc)
        self._combine()

    def _combine(self) -> None:
        self._table = merge(self._in_file or (), self._from_peers.values())
        # An unreadable file makes every key invalid.
        self._keys = {} if self._in_file is None else live(self._table)


def _from_table(key_id: str, table: dict[str, str]) -> ApiKey:
    if revoked := table.get("revoked"):
        return revoked_key(key_id, str(revoked))
    bytes.fromhex(table["salt"] + table["sha256"])
    if len(table["sha256"]) != 64:
        raise ValueError("a hash has 64 digits")
    name = str(table.get("name", ""))
    created = table.get("created", "")
    return ApiKey(key_id, Role(table["role"]), table["salt"], table["sha256"], created, name=name)


def _to_table(key: ApiKey) -> str:
    if key.revoked:
        return f'\n[{key.id}]\nrevoked = "{key.revoked}"\n'
    name = f"name = {json.dumps(key.name, ensure_ascii=False)}\n" if key.name else ""
    return (
        f'\n[{key.id}]\nrole = "{key.role}"\nsalt = "{key.salt}"\nsha256 = "{key.digest}"\ncreated = "{key.created}"\n'
        f"{name}"
    )
