"""The identity of this node: an id that survives restarts, and an incarnation that rises with each start."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from pathlib import Path
from typing import IO

import msgspec

from exo_mesh.base.printable import reason_of
from exo_mesh.errors import InputError

MAX_NODES_PER_HOME = 16

_log = logging.getLogger(__name__)


class Identity(msgspec.Struct, frozen=True):
    """`id` is 32 hex digits. The lock is held until `release`, so that no second node takes the same id."""

    id: str
    incarnation: int
    lock: IO[str]

    def release(self) -> None:
        """Release the lock, so that another node may use this id."""
        self.lock.close()


def take_identity(home: Path) -> Identity:
    """Take the first id in `home` that no running node uses; create one if there is none. Blocking file I/O.

    A second node on the same home gets its own id, the same one at each start, with a warning. Raises InputError if
    MAX_NODES_PER_HOME nodes run on this home or it cannot be written.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for slot in range(1, MAX_NODES_PER_HOME + 1):
            path = home / ("node_id" if slot == 1 else f"node_id.{slot}")
            lock = _locked(path)
            if lock is not None:
                if slot > 1:
                    _log.warning("another node already uses the home %s; this node uses the id in %s", home, path.name)
                return _read_and_count(lock)
    except OSError as exc:
        raise InputError(f"the home directory {home} cannot be used: {reason_of(exc)}", param="home") from exc
    raise InputError(f"{MAX_NODES_PER_HOME} nodes already run on {home}; give this one its own --home", param="home")


def _locked(path: Path) -> IO[str] | None:
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _read_and_count(lock: IO[str]) -> Identity:
    words = lock.read().split()
    known = len(words) == 2 and len(words[0]) == 32 and words[1].isdigit()
    node_id, starts = (words[0], int(words[1])) if known else (secrets.token_hex(16), 0)
    # Overwrite without truncating first: on a full disk a truncated file would lose the id.
    line = f"{node_id} {starts + 1}\n".encode()
    os.pwrite(lock.fileno(), line, 0)
    os.ftruncate(lock.fileno(), len(line))
    os.fsync(lock.fileno())
    return Identity(node_id, starts + 1, lock)
