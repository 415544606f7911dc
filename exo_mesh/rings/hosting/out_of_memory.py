"""Decides whether a runner ran out of memory: the kernel killed it, or an allocation failed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

CRITICAL = 2
"""See PressureLevel."""

_FAILED_ALLOCATION = re.compile(
    r"MemoryError|bad_alloc|out ?of ?memory|cannot allocate memory|unable to allocate|failed to allocate"
    r"|insufficient memory",
    re.IGNORECASE,
)
"""The messages of Python, C++, the kernel, CUDA, ROCm and Metal for a failed allocation."""

LOOK_EVERY_S = 5.0

_VMSTAT = Path("/proc/vmstat")


class OutOfMemory:
    """Watches one runner for signs that it ran out of memory. level: the last memory pressure that the node
    reported."""

    def __init__(self, vmstat: Path = _VMSTAT) -> None:
        self._vmstat = vmstat
        self._kills_before: int | None = None
        self._seen_at = float("-inf")
        self.level = 0

    def look(self, now: float) -> None:
        """Note that the process is alive now: all kills of the kernel so far were of other processes."""
        if now - self._seen_at >= LOOK_EVERY_S:
            self._seen_at, self._kills_before = now, _num_kills(self._vmstat)

    def killed(self, returncode: int | None) -> bool:
        """Whether the kernel killed the process for memory. Linux counts such kills; on other systems a SIGKILL while
        the machine was critically short of memory counts as one."""
        if returncode != -signal.SIGKILL:
            return False
        kills = _num_kills(self._vmstat)
        if kills is None or self._kills_before is None:
            return self.level >= CRITICAL
        return kills > self._kills_before

    @staticmethod
    def is_said_by(message: str) -> bool:
        """Whether the last message of a process or engine is about a failed allocation."""
        return _FAILED_ALLOCATION.search(message) is not None


def _num_kills(vmstat: Path) -> int | None:
    """Processes that the kernel has killed for memory since it booted; None if it does not count them."""
    try:
        found = re.search(r"^oom_kill (\d+)$", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
