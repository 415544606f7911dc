"""Lists and ends the processes of exo-mesh on this machine, for `exo-mesh node processes` and `kill-all`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli.tables import fitted, line_width
from exo_mesh.machine.own_processes import OwnProcess, end_processes, own_processes


class Sweep(msgspec.Struct, frozen=True):
    """The processes that were found. outcome: by pid, how the process ended; empty if none was to be ended."""

    found: tuple[OwnProcess, ...]
    outcome: dict[int, str]

    @property
    def left(self) -> bool:
        """Whether a process that should have ended still runs."""
        return any(word in ("not permitted", "stuck") for word in self.outcome.values())

    @property
    def values(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(one) | {"outcome": self.outcome.get(one.pid, "")} for one in self.found]

    @property
    def text(self) -> str:
        if not self.found:
            return "no exo-mesh process runs on this machine"
        return fitted(("PID", "KIND", "MEMORY", "HOME", "", ""), [self._row(one) for one in self.found], line_width())

    def _row(self, one: OwnProcess) -> list[object]:
        note = "its node has ended" if one.leftover else ""
        outcome = self.outcome.get(one.pid, "")
        return [one.pid, one.kind, human_bytes(one.rss_bytes), one.home or "?", note, outcome]


def sweep(default_home: Path, home: Path | None, grace_s: float | None) -> Sweep:
    """Finds processes and ends them. home: only the processes of that node. grace_s: SIGTERM to SIGKILL; None: end
    none."""
    found = own_processes(default_home, home)
    return Sweep(tuple(found), end_processes(found, grace_s) if grace_s is not None else {})
