"""The local token of a node: a caller that can read it from the node's home has local rights, from any address.

An address proves nothing: behind a proxy on the same machine, every stranger's call comes from the loopback. The token
is sent only to a port on which a live node of the same home listens, so that no other program gets it.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

FILE_NAME = "local_token"
PREFIX = "exo-local-"
TOKEN_BYTES = 32

_TEXT = re.compile(PREFIX + "[A-Za-z0-9_-]{43}")
_FOLDER = "listening"
"""Folder in the home with one file per API port, named after the port and locked by the node that listens there; the
file contains the host."""


def take_token(home: Path) -> str:
    """The token in the home, created at the first start. A token that others could read is replaced. Raises OSError."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(home / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+", encoding="ascii", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several nodes may start with one home at once
        token = file.read(len(PREFIX) + 64).strip()
        exposed = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
        if exposed or not _TEXT.fullmatch(token):
            token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
            os.fchmod(file.fileno(), 0o600)
            file.seek(0)
            file.truncate()
            file.write(token + "\n")
    return token


def read_token(home: Path) -> str:
    """The token in the home; "" if there is none that this user may read."""
    try:
        token = (home / FILE_NAME).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return token if _TEXT.fullmatch(token) else ""


def is_token(text: str, token: str) -> bool:
    """Whether a caller's text is the token. Takes constant time; no text equals an empty token."""
    return bool(token) and hmac.compare_digest(text.encode("utf-8", "surrogateescape"), token.encode())


class ListeningMark:
    """A file in the home that marks the port on which a node of this home serves the API. Raises OSError if it cannot
    be written."""

    def __init__(self, home: Path, host: str, port: int) -> None:
        folder = home / _FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / str(port)
        with _locked_folder(folder):
            _remove_stale(folder)
            # A new file, because a client that checks the old one may hold its lock for a moment.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "r+")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(host)
        self._file.flush()

    def close(self) -> None:
        """Remove the mark, because the node no longer listens. A killed node loses the lock, which has the same
        effect."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def token_for(home: Path, host: str, port: int | None) -> str:
    """The token, if a live node of this home serves the API at this address; otherwise ""."""
    bound = _bound_host(home / _FOLDER / str(port))
    if bound is None or not (host == bound.strip("[]") or _is_loopback(host)):
        return ""
    return read_token(home)


def _bound_host(path: Path) -> str | None:
    """The host in a mark whose lock is held; None if there is no such mark."""
    try:
        with path.open() as file:
            return file.read(300) if _is_locked(file) else None
    except (OSError, ValueError):
        return None


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Locks the folder while a mark is created, so that another starting node does not remove the mark before it is
    locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError), path.open() as file:
            if not _is_locked(file):
                path.unlink()


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
