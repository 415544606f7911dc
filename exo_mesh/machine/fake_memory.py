"""Simulates a machine with another amount of memory, to see what a mesh does on small or busy machines."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil

from exo_mesh.errors import InputError
from exo_mesh.machine.memory import MemoryReader, MemoryReading, read_memory
from exo_mesh.settings.values import size

MAX_FILE_BYTES = 256


def reader_for(override_bytes: int | None, file: Path | None) -> MemoryReader:
    """Returns the memory reader that the settings ask for: the machine's own, unless one of these is set.

    Raises InputError if both are set, or if the file cannot be used.
    """
    if override_bytes is not None and file is not None:
        raise InputError("--override-memory and --fake-mem-file contradict each other; give only one of them")
    if override_bytes is not None:
        return lambda: overridden(override_bytes)
    if file is not None:
        return FakeMemoryFile(file)
    if sys.platform != "darwin":
        return read_memory
    from exo_mesh.machine.mac_memory import MacMemory

    return MacMemory()


def overridden(total_bytes: int) -> MemoryReading:
    """Reads a machine with this much memory on which only this node and its runners run.

    The memory of these processes counts as used, or two plans would get the same bytes. A process that is about to end
    may be counted or not.
    """
    node = psutil.Process()
    taken = 0
    for process in (node, *node.children(recursive=True)):
        try:
            taken += process.memory_info().rss
        except psutil.Error:  # it has ended in the meantime
            continue
    return MemoryReading(total_bytes, max(0, total_bytes - taken), why="--override-memory")


class FakeMemoryFile:
    """A MemoryReader of a file with two sizes, `TOTAL AVAILABLE` such as `16GiB 12GiB`; each call reads it again.

    While the file is being changed it may be incomplete: an unreadable file leaves the last reading in force.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last = self._read()

    def __call__(self) -> MemoryReading:
        with contextlib.suppress(InputError):
            self._last = self._read()
        return self._last

    def _read(self) -> MemoryReading:
        try:
            with self._file.open() as opened:
                words = opened.read(MAX_FILE_BYTES).split()
            total, available = (0 if word == "0" else size(word) for word in words)
        except (OSError, UnicodeDecodeError, ValueError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "the file must contain two sizes, TOTAL AVAILABLE"
            raise InputError(f"--fake-mem-file {self._file}: {why}") from exc
        if not 0 <= available <= total or not total:
            why = f"AVAILABLE {available} must be at most TOTAL {total}, and TOTAL above 0"
            raise InputError(f"--fake-mem-file {self._file}: {why}")
        return MemoryReading(total, available, why="--fake-mem-file")
