"""Limits that the operating system enforces for a child process which handles untrusted input."""

from __future__ import annotations

import math
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

CPU_GRACE_S = 2.0


def limit_process(max_bytes: int, *, allows_threads: bool = False) -> None:
    """Set the limits that hold until this process ends: no file written, no core dump, no new process (unless root
    runs the node) and no thread, if none are allowed, and at most max_bytes more of address space. Only Linux can limit
    the address space."""
    kinds = [resource.RLIMIT_CORE, resource.RLIMIT_FSIZE]
    for kind in kinds if allows_threads else [*kinds, resource.RLIMIT_NPROC]:
        resource.setrlimit(kind, (0, 0))
    with suppress(OSError):  # without /proc the size of this process is not known
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + max_bytes, used + max_bytes))


def limit_cpu(limit_s: float) -> None:
    """Let the system end this process after limit_s and CPU_GRACE_S more seconds of CPU time, counted from now."""
    seconds = math.ceil(time.process_time() + limit_s + CPU_GRACE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def limit_work(cpu_s: float, max_bytes: int, written_bytes: int | None = None) -> None:
    """Let the system end this process after cpu_s of CPU time, and refuse more memory and longer files than these. Only
    Linux limits the address space. A lower limit that is in force stays."""
    limits = {resource.RLIMIT_CPU: int(cpu_s), resource.RLIMIT_FSIZE: written_bytes}
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = max_bytes
    for kind, most in limits.items():
        if most is not None:
            _, hard = resource.getrlimit(kind)
            wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (wanted, wanted))
