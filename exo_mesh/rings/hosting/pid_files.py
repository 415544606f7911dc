"""Records the processes that this node has started, so that its next start can end processes that a crash left behind.

A runner ends with its node by itself: its pipe closes, and on Linux the kernel kills it. These files are for a runner
that could not end: stopped by a debugger, or stuck in a driver on a system without such a signal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from pathlib import Path

import msgspec
import psutil

from exo_mesh.machine.disk import Disk

SAME_S = 2.0
"""Two readings of the start of one process differ by less: the boot time is read again, and clocks are set."""

KILLED_S = 2.0
"""Seconds that the kernel may take to end a killed process."""

_log = logging.getLogger(__name__)


class PidFiles(msgspec.Struct, frozen=True):
    """One file per process in a directory that belongs to one node id."""

    directory: Path
    disk: Disk

    def note(self, pid: int, label: str) -> None:
        """Record a process that has started and leads a session of its own. A full disk does not keep it from
        running."""
        with contextlib.suppress(psutil.Error):
            began = psutil.Process(pid).create_time()
            text = json.dumps({"pid": pid, "began": began, "label": label})
            self.disk.write(self.directory / f"{pid}.json", text, "the list of runners")

    def forget(self, pid: int) -> None:
        """Forget a process that has ended."""
        with contextlib.suppress(OSError):
            (self.directory / f"{pid}.json").unlink(missing_ok=True)

    def reap(self) -> list[str]:
        """Kill what an earlier start of this node left behind; returns the labels. Blocks for up to KILLED_S."""
        ended = []
        for file in self._files():
            process, label = _left_behind(file)
            if process is not None:
                _log.warning("killing %s (pid %d), left over from an earlier start of this node", label, process.pid)
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(psutil.Error):
                    process.wait(KILLED_S)
                ended.append(label)
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        return ended

    def _files(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(self.directory.glob("*.json"))
        return []


def _left_behind(file: Path) -> tuple[psutil.Process | None, str]:
    """The process of a file, if it still runs; a newer process with the same pid does not count."""
    try:
        noted = json.loads(file.read_bytes())
        pid, began, label = int(noted["pid"]), float(noted["began"]), str(noted["label"])[:200]
        process = psutil.Process(pid)
        if pid > 1 and abs(process.create_time() - began) < SAME_S and process.status() != psutil.STATUS_ZOMBIE:
            return process, label
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        pass
    return None, ""
