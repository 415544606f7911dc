"""Keeps the home directory of a node private to its user, since it records who sent requests and when."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from exo_mesh.base.printable import reason_of
from exo_mesh.settings.config import ConfigError

PRIVATE_UMASK = 0o077
"""The umask of a node and its runners."""

_OWN = (
    "node_id*", "api_keys.toml", "config.toml", "mesh_settings.json", "hub_token", "logs", "runners", "quarantine",
    "known_peers.json", "surveys", "selftests", "text",
)  # fmt: skip
"""Files and directories that a node makes in its home. `models` is not listed, since a user may share it with other
programs."""


def make_private(home: Path) -> None:
    """Creates the home with mode 0700, and repairs modes that an older version set: directories 0700, files 0600.

    A home with another purpose keeps its mode (the user's home directory, one with the sticky bit such as /tmp, one of
    another user), but the node's files in it are repaired. Raises ConfigError if the home cannot be made or read.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        _repair(home)
    except OSError as exc:
        raise ConfigError(f"the home directory {home} cannot be used: {reason_of(exc)}", param="home") from exc


def _repair(home: Path) -> None:
    if home.resolve() != Path.home().resolve() and not home.stat().st_mode & stat.S_ISVTX:
        _restrict(home)
    for path in _own_paths(home):
        _restrict(path)


def _own_paths(home: Path) -> Iterator[Path]:
    for pattern in _OWN:
        for top in home.glob(pattern):
            yield top
            if top.is_dir() and not top.is_symlink():
                for folder, directories, files in os.walk(top):
                    yield from (Path(folder, name) for name in (*directories, *files))


def _restrict(path: Path) -> None:
    """Removes the permissions of other users from a file or directory of ours; does not follow symlinks."""
    found = path.lstat()
    shared = stat.S_IMODE(found.st_mode) & PRIVATE_UMASK
    if shared and found.st_uid == os.geteuid() and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        path.chmod(stat.S_IMODE(found.st_mode) & ~PRIVATE_UMASK)
