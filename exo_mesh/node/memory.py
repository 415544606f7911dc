"""How much memory models may take on this machine, now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

HEADROOM_SHARE = 0.1
MAX_HEADROOM_BYTES = 2**30
"""Left free for the rest of the machine: a tenth of its memory, but no more than 1 GiB."""

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes that the machine (or the container) has, and that a new process could get without swapping."""

    total_bytes: int
    available_bytes: int


MemoryReader = Callable[[], MemoryReading]


def read_memory() -> MemoryReading:
    """The tighter of what the system and what the control group of this process allow."""
    system = psutil.virtual_memory()
    total, available = int(system.total), int(system.available)
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _number_in(limit_file), _number_in(usage_file)
        if limit is not None and usage is not None and limit < total:
            total, available = limit, min(available, max(0, limit - usage))
    return MemoryReading(total, available)


def headroom(total_bytes: int) -> int:
    """What plans leave free of a machine's memory, in bytes."""
    return min(int(HEADROOM_SHARE * total_bytes), MAX_HEADROOM_BYTES)


def usable_bytes(reading: MemoryReading, max_memory_bytes: int | None, reserved_bytes: int, pending_bytes: int) -> int:
    """What a new reservation could get.

    reserved_bytes: all leases. pending_bytes: the part of them that no process has taken yet, which is therefore
    still counted as available by the system.
    """
    usable = reading.available_bytes - headroom(reading.total_bytes) - pending_bytes
    if max_memory_bytes is not None:
        usable = min(usable, max_memory_bytes - reserved_bytes)
    return max(0, usable)


def _number_in(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
