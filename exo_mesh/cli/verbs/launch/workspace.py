"""The directory of one run of an agent, and the removal of directories whose run was killed.

A directory is locked while its run lasts. The agent inherits the lock, so that the directory of an agent that outlives
its killed launcher stays until the agent has ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from exo_mesh.base.random_hex import random_hex
from exo_mesh.security.own_nodes import locked_folder

_LOCK, _RECORD = "lock", "run.json"
KEEP_S = 30 * 86_400.0
"""How long the record of a key that could not be revoked is kept."""


class Workspace:
    """One locked directory, which only its owner can read."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        """The descriptor that holds the lock; an agent may inherit it."""

    @classmethod
    def create(cls, root: Path) -> Workspace:
        """Create a directory below `root`. Raises OSError."""
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        with locked_folder(root):
            path = root / random_hex(8)
            path.mkdir(mode=0o700)
            return cls(path, _locked(path))

    def write(self, files: Mapping[str, str]) -> None:
        """Write files that only the owner can read."""
        for name, text in files.items():
            descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)

    def record(self, url: str, key_id: str) -> None:
        """Note the key that was made for this run, so that a later run can revoke it if this one is killed."""
        self.write({_RECORD: json.dumps({"url": url, "key_id": key_id})})

    def remove(self) -> None:
        """Remove the directory and its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_abandoned(root: Path, revoke: Callable[[str, str], bool]) -> list[str]:
    """Remove the directories whose runs have ended without doing so. revoke: revokes a key, by URL and id; False if it
    may still be valid. Returns the ids of the keys that may still be valid."""
    if not root.is_dir():
        return []
    left = []
    for workspace in _abandoned(root):
        record = _read(workspace.path / _RECORD)
        for path in workspace.path.iterdir():
            if path.name not in (_LOCK, _RECORD):  # first of all, what may contain a key
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if record and not revoke(record["url"], record["key_id"]) and _age_s(workspace.path / _RECORD) < KEEP_S:
            left.append(record["key_id"])
            os.close(workspace.lock)
        else:
            workspace.remove()
    return left


def _abandoned(root: Path) -> list[Workspace]:
    with locked_folder(root):
        found = []
        for path in root.iterdir():
            with suppress(OSError):  # it is locked, or another run removes it
                found.append(Workspace(path, _locked(path)))
        return found


def _locked(path: Path) -> int:
    """Lock a directory of a run; returns the descriptor. Raises BlockingIOError if a run has it."""
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read(path: Path) -> dict[str, str]:
    """The record of a run; {} if it has none, or not a whole one."""
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        return {name: str(record[name]) for name in ("url", "key_id")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime
