"""What a service consists of: files to write and commands to run. Values only; applying.py carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServiceStep:
    """A command. may_fail: its failure is shown and changes nothing."""

    command: Command
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """A file of a service. is_own: it belongs to the person who edits it: written once, never changed or removed.
    owner: the user who gets it, and the directories that are made for it; by default who installs."""

    path: Path
    text: str
    is_own: bool = False
    mode: int = 0o644
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One service, of the machine or of a person.

    stale: files of earlier installations that this one does not have. before, start: commands of an installation, in
    this order, `start` only if something changed or it does not run; offline: instead of both, below another root
    directory. stop, after: commands of an uninstallation, before and after the files are removed. state: asks for the
    state; logs: what shows the log. kept: directories that uninstalling leaves.
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
        """The file that makes it a service."""
        return self.files[0]
