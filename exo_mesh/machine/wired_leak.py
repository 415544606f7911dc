"""Detects memory that macOS keeps wired for a GPU driver after its process has ended; only a restart frees it. Pure."""

from __future__ import annotations

LEAST_BYTES = 5 * 10**9
LEAST_SHARE = 0.04
"""More wired memory than this belongs to a GPU: macOS itself wires 2 to 4 GB, and more on machines with much memory."""

SETTLED_S = 30.0
"""macOS takes seconds to unwire the memory of an ended process."""


class WiredLeak:
    """Watches wired memory while no runner lives."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.num_bytes = 0
        """Memory that is wired for no process; 0 if there is none."""

    def note(self, wired_bytes: int | None, total_bytes: int, num_runners: int, now: float) -> None:
        """Takes a reading. wired_bytes: None if the system does not report it."""
        least = max(LEAST_BYTES, int(LEAST_SHARE * total_bytes))
        if wired_bytes is None or num_runners or wired_bytes <= least:
            self._since, self.num_bytes = None, 0
            return
        if self._since is None:
            self._since = now
        self.num_bytes = wired_bytes if now - self._since >= SETTLED_S else 0
