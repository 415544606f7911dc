"""Reads how much memory models may use on this machine now."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

HEADROOM_SHARE = 0.1
MAX_HEADROOM_BYTES = 2**30
"""Left free for the rest of the machine: a tenth of its memory, but no more than 1 GiB."""

_READ_BYTES = 16 * 1024

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_FILES = {  # by version: (limit, usage, entry of memory.stat for cache that the kernel gives back at once)
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class MemoryReading(msgspec.Struct, frozen=True):
    """The memory of a device (the machine, the container, or a GPU): all bytes, and the bytes that a new process could
    get.

    ceiling_bytes: what all models together may use, if less than all. headroom_bytes: what is left free; None for the
    rule above. why: the origin of the figures, for people. wired_bytes: what cannot be swapped, if the system reports
    it.
    """

    total_bytes: int
    available_bytes: int
    ceiling_bytes: int | None = None
    headroom_bytes: int | None = None
    why: str = ""
    wired_bytes: int | None = None


MemoryReader = Callable[[], MemoryReading]
"""Returns at once, because it is called on the event loop."""


def read_memory() -> MemoryReading:
    """Reads the memory that both the system and the control groups of this process allow."""
    system = psutil.virtual_memory()
    found = MemoryReading(int(system.total), int(system.available), why="the system's memory")
    return tightest(found, _read_cgroups())


def tightest(system: MemoryReading, groups: Iterable[tuple[int, int]]) -> MemoryReading:
    """Limits the system's reading by control groups with these (limit, usage)."""
    total, available, why = system.total_bytes, system.available_bytes, system.why
    for limit, usage in groups:
        available = min(available, max(0, limit - usage))
        if limit < total:
            total, why = limit, "the limit of this process's control group"
    return MemoryReading(total, available, why=why)


def headroom(total_bytes: int) -> int:
    """Bytes of a machine's memory that plans leave free."""
    return min(int(HEADROOM_SHARE * total_bytes), MAX_HEADROOM_BYTES)


def usable_bytes(reading: MemoryReading, max_memory_bytes: int | None, reserved_bytes: int, pending_bytes: int) -> int:
    """Bytes that a new reservation could get.

    reserved_bytes: all leases. pending_bytes: the part of them that no process has used yet, which the system still
    counts as available.
    """
    left_free = headroom(reading.total_bytes) if reading.headroom_bytes is None else reading.headroom_bytes
    usable = reading.available_bytes - left_free - pending_bytes
    for most in (max_memory_bytes, reading.ceiling_bytes):
        if most is not None:
            usable = min(usable, most - reserved_bytes)
    return max(0, usable)


def capacity_bytes(reading: MemoryReading, max_memory_bytes: int | None) -> int:
    """Bytes that models could use if nothing else ran on the machine."""
    left_free = headroom(reading.total_bytes) if reading.headroom_bytes is None else reading.headroom_bytes
    most = [reading.total_bytes - left_free, max_memory_bytes, reading.ceiling_bytes]
    return max(0, min(one for one in most if one is not None))


def _read_cgroups(root: Path = _CGROUP_ROOT, own: Path = Path("/proc/self/cgroup")) -> Iterator[tuple[int, int]]:
    """Yields (limit, usage) of every control group with a limit that this process is in.

    Cached files that the kernel may drop count as free; otherwise a model that was loaded once would seem to fill the
    group.
    """
    for group in _groups(str(root), _text_of(own)):
        limit = _number_in(group.limit)
        if limit is not None and (usage := _number_in(group.usage)) is not None:
            yield limit, max(0, usage - _stat(group.stat, group.cache_key))


class _Group(NamedTuple):
    """Paths of the files of a control group. cache_key: see _CGROUP_FILES."""

    limit: str
    usage: str
    stat: str
    cache_key: str


@functools.lru_cache(maxsize=4)
def _groups(root: str, own: str) -> tuple[_Group, ...]:
    """The control groups in the text of /proc/self/cgroup, from the own one up to the root. In a container its own is
    the root. Kept, because an idle node reads its memory several times a second."""
    found = []
    for directory, version in _cgroup_directories(Path(root), own):
        limit_file, usage_file, cache_key = _CGROUP_FILES[version]
        limit, usage, stat = (str(directory / name) for name in (limit_file, usage_file, "memory.stat"))
        found.append(_Group(limit, usage, stat, cache_key))
    return tuple(found)


def _cgroup_directories(root: Path, own: str) -> Iterator[tuple[Path, int]]:
    """Yields this process's control groups, from its own up to the root (in a container: the same), with version."""
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, version = root, 2
        elif "memory" in controllers.split(","):
            base, version = root / "memory", 1
        else:
            continue
        inner = base / path.strip("/")
        for directory in dict.fromkeys((inner, *inner.parents)):
            if directory == base or base in directory.parents:
                yield directory, version


def _stat(file: str, key: str) -> int:
    for line in _text_of(file).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _number_in(file: str) -> int | None:
    text = _text_of(file).strip()
    return int(text) if text.isdigit() else None


def _text_of(file: str | Path) -> str:
    """The text of a small system file; "" if it cannot be read. Without a file object, which would cost three times as
    much: an idle node does little else."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while part := os.read(opened, _READ_BYTES):
                parts.append(part)
        finally:
            os.close(opened)
    except OSError:
        return ""
    return b"".join(parts).decode(errors="replace")
