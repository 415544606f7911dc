"""Finds the program of a service, `exo-mesh` of this environment, and checks that the sandboxed service can read it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

import exo_mesh
from exo_mesh.settings.config import ConfigError

_HIDDEN = {
    "/home": "ProtectHome hides home directories from the service",
    "/root": "ProtectHome hides home directories from the service",
    "/run/user": "ProtectHome hides home directories from the service",
    "/tmp": "the service has a private /tmp",
    "/var/tmp": "the service has a private /var/tmp",
}
"""Directories that ProtectHome=yes and PrivateTmp=yes hide from the system unit; see systemd.exec(5)."""

REMEDY = (
    "install exo-mesh where every user may read it, such as "
    "`sudo python3 -m venv /opt/exo-mesh && sudo /opt/exo-mesh/bin/pip install exo-mesh`, and run "
    "`service install` of that one; or install a service of your account: `exo-mesh service install --user`"
)


def own_program() -> Path:
    """The path of `exo-mesh` beside the current interpreter. Raises ConfigError if exo-mesh is not installed there."""
    program = Path(sys.executable).parent / "exo-mesh"
    if not os.access(program, os.X_OK):
        raise ConfigError(
            f"{program} does not exist, and a service needs an installed exo-mesh. "
            "Install it into this environment (`pip install exo-mesh`) and run its `exo-mesh service install`"
        )
    return program


def needed_paths(program: Path) -> list[Path]:
    """The files and directories that the program needs to start, for the current interpreter."""
    packages = Path(exo_mesh.__file__).resolve().parent
    named = [program, Path(sys.executable), Path(sys.executable).resolve(), Path(sys.prefix), Path(sys.base_prefix)]
    return list(dict.fromkeys([*named, packages]))


def require_readable(paths: Iterable[Path]) -> None:
    """Raises ConfigError with a remedy for the first path that the system unit's user cannot read."""
    for path in paths:
        if why := obstacle(path):
            target = "" if path.resolve() == path else f", which leads to {path.resolve()}"
            raise ConfigError(f"the service cannot read {path}{target}: {why}; {REMEDY}")


def obstacle(path: Path) -> str:
    """The reason why the system unit cannot read a path; "" if it can. Its user owns no files and is in no group."""
    for candidate in (path, path.resolve()):
        for hidden, why in _HIDDEN.items():
            if candidate.is_relative_to(hidden):
                return why
    whole = path.resolve()
    for part in (*reversed(whole.parents), whole):
        mode = part.stat().st_mode
        wanted = stat.S_IROTH | stat.S_IXOTH if part == whole and part.is_dir() else stat.S_IXOTH
        wanted = stat.S_IROTH if part == whole and part.is_file() else wanted
        if mode & wanted != wanted:
            return f"{part} has mode {stat.S_IMODE(mode):04o}, so only some users may read it"
    return ""
