"""Remembers what got stuck here before it ever worked: not tried on this node until its time is up, also after a
restart.

A crash frees what the process held. A driver that hangs may not: on some machines each hang keeps gigabytes of memory
until the next boot, so that trying again makes everything worse.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from exo_mesh.machine.disk import Disk

TTL_S = 600.0
MAX_KEPT = 64

_log = logging.getLogger(__name__)


class Case(msgspec.Struct, frozen=True):
    """One quarantined model and engine. digest: of the model. flags: of the engine's options. since, until: Unix
    seconds."""

    model: str
    digest: str
    engine: str
    flags: str
    cause: str
    since: float
    until: float

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.until))
        what = f"{self.model} with {self.engine} got stuck here before it was ready"
        return f"{what}; it is not tried again before {at}: {self.cause}"

    @property
    def remedy(self) -> str:
        """A remedy for an operator."""
        boot = "reboot this Mac, which frees what the GPU driver still holds; " if sys.platform == "darwin" else ""
        return (
            f"{boot}use another engine here (--model-engine {self.model}=NAME), or let it be tried again now: "
            "DELETE /v1/diagnostics/node/quarantine"
        )


def flags_of(options: Mapping[str, str]) -> str:
    """A short hash of an engine's options."""
    return hashlib.sha256(json.dumps(sorted(options.items())).encode()).hexdigest()[:16]


class Quarantine:
    """The cases, kept in `file`; in memory alone if the disk is full."""

    def __init__(self, file: Path, disk: Disk, now: Callable[[], float] = time.time, ttl_s: float = TTL_S) -> None:
        self._file = file
        self._disk = disk
        self._now = now
        self._ttl_s = ttl_s
        self._cases = _read(file)

    def put(self, model: str, digest: str, engine: str, flags: str, cause: str) -> None:
        """Quarantine a model and engine from now on, for the time to live."""
        now = self._now()
        others = [case for case in self.cases if (case.digest, case.engine, case.flags) != (digest, engine, flags)]
        case = Case(model, digest, engine, flags, cause[:400], now, now + self._ttl_s)
        self._cases = [*others, case][-MAX_KEPT:]
        _log.warning("quarantine: %s", case)
        self._keep()

    def find(self, digest: str, engine: str, flags: str) -> Case | None:
        """The case that forbids this model and engine, or None."""
        wanted = (digest, engine, flags)
        return next((case for case in self.cases if (case.digest, case.engine, case.flags) == wanted), None)

    @property
    def cases(self) -> list[Case]:
        """The cases in force. A clock that was set back does not make a case last longer than its time to live."""
        now = self._now()
        return [case for case in self._cases if now < case.until <= now + self._ttl_s]

    def lift(self) -> int:
        """Forget all cases; returns how many there were."""
        lifted = len(self.cases)
        self._cases = []
        self._keep()
        return lifted

    def _keep(self) -> None:
        self._disk.write(self._file, msgspec.json.encode(self._cases).decode(), "the quarantine")


def _read(file: Path) -> list[Case]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Case])[-MAX_KEPT:]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as exc:
        _log.warning("cannot read %s, so nothing is in quarantine: %s", file, exc)
        return []
