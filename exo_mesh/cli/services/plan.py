"""The plan of a service: files to write and commands to run. Values only; applying.py carries the plan out."""

from __future__ import annotations

from pathlib import Path

import msgspec

Command = tuple[str, ...]


class ServiceStep(msgspec.Struct, frozen=True):
    """A command. may_fail: a failure is reported and the installation continues."""

    command: Command
    may_fail: bool = False


class ServiceFile(msgspec.Struct, frozen=True):
    """A file of a service.

    is_own: the user edits it, so it is written once, never changed or removed. owner: owner of the file and of the
    directories made for it; "" for the user who installs.
    """

    path: Path
    text: str
    is_own: bool = False
    mode: int = 0o644
    owner: str = ""


class ServicePlan(msgspec.Struct, frozen=True):
    """The plan of one service, of the machine or of a user.

    stale: files of earlier installations that this one removes. before, start: commands of an installation, in this
    order; `start` only if a file changed or the service does not run. offline: replaces both below another root
    directory. stop, after: commands of an uninstallation, before and after the files are removed. state: command that
    prints the state; logs: command that shows the log. kept: directories that an uninstallation leaves.
    """

    name: str
    files: tuple[ServiceFile, ...]
    stale: tuple[Path, ...]
    before: tuple[ServiceStep, ...]
    start: tuple[ServiceStep, ...]
    offline: tuple[ServiceStep, ...]
    stop: tuple[ServiceStep, ...]
    after: tuple[ServiceStep, ...]
    state: Command
    logs: str
    kept: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> ServiceFile:
        """The unit or plist: the file that defines the service."""
        return self.files[0]
