"""Whether a runner has ended for want of memory: by the kernel's hand, or because an allocation failed."""

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
"""How Python, C++, the kernel, CUDA, ROCm and Metal say that they could not get memory."""

LOOK_EVERY_S = 5.0

_VMSTAT = Path("/proc/vmstat")


class OutOfMemory:
    """Signs of one runner, looked for as long as it runs. level: how short of memory the node last said it was."""

    def __init__(self, vmstat: Path = _VMSTAT) -> None:
        self._vmstat = vmstat
        self._kills_before: int | None = None
        self._seen_at = float("-inf")
        self.level = 0

    def look(self, now: float) -> None:
        """The process lives now: what the kernel has killed until now was another one."""
        if now - self._seen_at >= LOOK_EVERY_S:
            self._seen_at, self._kills_before = now, _num_kills(self._vmstat)

    def killed(self, returncode: int | None) -> bool:
        """Whether the kernel killed the process for memory. Linux counts its kills; where nobody counts, a SIGKILL
        while the machine was critically short of memory is one."""
        if returncode != -signal.SIGKILL:
            return False
        kills = _num_kills(self._vmstat)
        if kills is None or self._kills_before is None:
            return self.level >= CRITICAL
        return kills > self._kills_before

    @staticmethod
    def is_said_by(message: str) -> bool:
        """Whether the last words of a process or engine are of an allocation that failed."""
        return _FAILED_ALLOCATION.search(message) is not None


def _num_kills(vmstat: Path) -> int | None:
    """Processes that the kernel has killed for memory since it booted; None if it does not count them."""
    try:
        found = re.search(r"^oom_kill (\d+)$", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
