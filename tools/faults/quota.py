"""Slow machines: a control group with a CPU quota for each node and all that it starts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
"""Quotas count in periods of 0.1 s: a node that has used its part stands still until the next one."""


class CpuQuota:
    """A quota of CPU time for each node. Needs root, and control groups of version 1 or 2 that it may write."""

    def __init__(self, cores: float) -> None:
        """cores: of each node; 0: no quota. Raises OSError if there cannot be one here."""
        self._cores = cores
        self._is_first_version = (CGROUPS / "cpu" / "cpu.cfs_quota_us").exists()
        self._made: list[Path] = []
        try:
            if cores:
                self._make(f"exo-mesh-try-{os.getpid()}")
        except OSError:
            self.close()
            raise

    def hold(self, pid: int, name: str) -> None:
        """Put a process that has just started into the group of a node; what it starts stays there."""
        if self._cores:
            (self._make(f"exo-mesh-{name}-{os.getpid()}") / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the groups, which must be empty by then."""
        for group in self._made:
            with contextlib.suppress(OSError):
                group.rmdir()

    def _make(self, name: str) -> Path:
        group = (CGROUPS / "cpu" if self._is_first_version else CGROUPS) / name
        if group not in self._made:
            group.mkdir(exist_ok=True)
            self._made.append(group)
            quota_us = int(self._cores * PERIOD_US)
            if self._is_first_version:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        return group
