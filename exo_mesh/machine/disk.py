"""All of a node's writes to its home go through here: bounded, whole files or none, and a failure never stops serving.

A node stores files to save time (what engines reported about models) or to remember (quarantine). On a full disk it
works without them: `write` returns False, `problem` gives reason and remedy, and both recover when there is space
again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from exo_mesh.domain.health import HealthLevel, Reason

FLOOR_SHARE, FLOOR_BYTES = 0.05, 64 * 2**20
"""Nothing is written if less than this would be left: 5 % of the volume, but no more than 64 MiB."""

LOW_SHARE, LOW_BYTES = 0.1, 10 * 10**9
"""Below this a hint is shown: 10 % of the volume, but no more than 10 GB, which one model takes."""

SCARCE_SHARE, SCARCE_BYTES = 0.05, 2 * 10**9
"""Below this the node is degraded, and still writes: 5 % of the volume, but no more than 2 GB. No model of use is
smaller."""

READ_EVERY_S = 1.0

PROBE_BYTES = 64 * 2**10
"""Most bytes that are written to test whether writing works again."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger(__name__)


class Disk:
    """The volume that `home` is on. `read` returns its (total, free) bytes, or raises OSError."""

    def __init__(
        self,
        home: Path,
        now: Callable[[], float] = time.monotonic,
        read: Callable[[Path], tuple[int, int]] | None = None,
    ) -> None:
        self.home = home
        self._now = now
        self._read = read or _usage
        self._read_at = float("-inf")
        self._usage = (0, 0)
        self._failed: OSError | None = None
        self._failed_what = ""
        self._failed_bytes = 0
        self._turn = threading.Lock()
        self.refused = 0
        """Number of writes that were skipped so far."""

    @property
    def total_bytes(self) -> int:
        return self._look()[0]

    @property
    def free_bytes(self) -> int:
        """What an unprivileged process may still write; 0 if that is unknown."""
        return self._look()[1]

    @property
    def floor_bytes(self) -> int:
        """Bytes that are always left free."""
        return min(FLOOR_BYTES, int(FLOOR_SHARE * self.total_bytes))

    def has_room(self, num_bytes: int) -> bool:
        """Whether this many bytes may be written. If the volume cannot be measured, True: the write itself may fail."""
        total, free = self._look(fresh=True)
        return not total or free - num_bytes >= self.floor_bytes

    def write(self, file: Path, text: str, what: str) -> bool:
        """Writes a small file whole or not at all; returns False, and sets `problem`, if that fails. what: for people.

        Safe to call from several threads, also for the same file.
        """
        with self._turn:  # a file has one scratch file, so that a kill leaves at most one behind
            return self._write(file, text, what)

    def _write(self, file: Path, text: str, what: str) -> bool:
        scratch = file.with_name(f"{file.name}.new")
        try:
            if not self.has_room(len(text)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(text)
            scratch.replace(file)
        except OSError as exc:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            self.failed(exc, what, len(text))
            return False
        self._failed = None
        return True

    def failed(self, error: OSError, what: str, num_bytes: int = 4096) -> None:
        """Records that `what`, of this many bytes, could not be written below the home."""
        self.refused += 1
        if self._failed is None or self._failed.errno != error.errno:
            _log.warning("%s cannot be written below %s: %s", what, self.home, error.strerror or error)
        self._failed, self._failed_what, self._failed_bytes = error, what, min(num_bytes, PROBE_BYTES)

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed."""
        return self._failed is not None

    def check(self) -> None:
        """Writes again after a failure, so that `problem` goes away with its cause. Blocks."""
        if self._failed is not None:
            probe, refused = self.home / f"disk-probe.{os.getpid()}", self.refused
            self.write(probe, "." * self._failed_bytes, self._failed_what)
            self.refused = refused  # the probe does not count
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)

    def problem(self) -> Reason | None:
        """Returns the problem of the disk now, or None."""
        total, free = self._look()
        room = f"{_megabytes(free)} of {_megabytes(total)} are free at {self.home}"
        full = bool(total) and free < self.floor_bytes
        if full or (self._failed is not None and self._failed.errno in _FULL):
            return Reason(
                "disk_full",
                HealthLevel.DEGRADED,
                f"{room}, or writing is limited; requests are served, but nothing new is written to disk",
                f"free space on that volume ({_megabytes(self.floor_bytes)} stay unused), raise the limit, or give "
                "--home a directory elsewhere",
            )
        if self._failed is not None:
            return Reason(
                "disk_unwritable",
                HealthLevel.DEGRADED,
                f"{self._failed_what} cannot be written below {self.home}: {self._failed.strerror or self._failed}",
                "give --home a directory that this user may write to",
            )
        if total and free < min(SCARCE_BYTES, int(SCARCE_SHARE * total)):
            remedy = "free space on that volume, or give --home a directory elsewhere"
            return Reason("disk_low", HealthLevel.DEGRADED, f"{room}, too little for another model", remedy)
        if total and free < min(LOW_BYTES, int(LOW_SHARE * total)):
            remedy = "free space before models are added or engines write their caches"
            return Reason("disk_low", HealthLevel.OK, f"only {_megabytes(free)} are free at {self.home}", remedy)
        return None

    def _look(self, *, fresh: bool = False) -> tuple[int, int]:
        now = self._now()
        if fresh or now - self._read_at >= READ_EVERY_S:
            self._read_at = now
            try:
                self._usage = self._read(self.home)
            except OSError:
                self._usage = (0, 0)
        return self._usage


def _usage(path: Path) -> tuple[int, int]:
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"
