"""Memory that macOS keeps wired for a GPU driver after its process has ended: only a restart of the machine frees it.
Pure."""

from __future__ import annotations

LEAST_BYTES = 5 * 10**9
LEAST_SHARE = 0.04
"""More than this is wired only for a GPU: macOS itself wires 2 to 4 GB, and more on machines with much memory."""

SETTLED_S = 30.0
"""macOS takes seconds to unwire what a process had."""


class WiredLeak:
    """Watches wired memory while no runner lives."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.num_bytes = 0
        """What is wired for nobody; 0 if nothing is."""

    def note(self, wired_bytes: int | None, total_bytes: int, num_runners: int, now: float) -> None:
        """A reading. wired_bytes: None where the system does not say."""
        least = max(LEAST_BYTES, int(LEAST_SHARE * total_bytes))
        if wired_bytes is None or num_runners or wired_bytes <= least:
            self._since, self.num_bytes = None, 0
            return
        if self._since is None:
            self._since = now
        self.num_bytes = wired_bytes if now - self._since >= SETTLED_S else 0
