"""Reads the memory of a Mac from `vm_stat`: what macOS could give to a new process without swapping."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from msgspec.structs import replace

from exo_mesh.machine.memory import MemoryReader, MemoryReading, read_memory
from exo_mesh.machine.tool_output import ask

POLL_S = 1.5
STALE_READINGS = 5
"""After this many polls without an answer, the collector's figure is used."""

_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
_COUNT = re.compile(r"^\"?([A-Z][^:\"]*)\"?: +(\d+)\.$", re.MULTILINE)
_TAKEN = ("Pages wired down", "Anonymous pages", "Pages occupied by compressor")
"""Pages that must stay in memory or be swapped out. All others are free, or belong to files that can be reread."""


def parse_vm_stat(output: str, total_bytes: int) -> tuple[int, int] | None:
    """Returns (available, wired) in bytes; None if this is not the output of `vm_stat`.

    available = total - wired - anonymous - compressor. Free and inactive pages would be wrong both ways: inactive pages
    may be dirty pages of programs, and active pages may be files that can be dropped.
    """
    page = _PAGE_SIZE.search(output)
    counts = {name: int(pages) for name, pages in _COUNT.findall(output)}
    if page is None or not all(name in counts for name in _TAKEN):
        return None
    page_bytes = int(page[1])
    taken = sum(counts[name] for name in _TAKEN) * page_bytes
    return max(0, total_bytes - taken), counts["Pages wired down"] * page_bytes


class MacMemory:
    """A MemoryReader that answers at once: a thread runs the tool, and a call returns the last result."""

    def __init__(
        self,
        collector: MemoryReader = read_memory,
        run: Callable[[], str] = lambda: ask(["vm_stat"]),
        poll_s: float = POLL_S,
    ) -> None:
        """collector: gives the total, and the whole reading when the tool gives none."""
        self._collector = collector
        self._run = run
        self._poll_s = poll_s
        self._missed = 0
        self._said: tuple[int, int] | None = None
        self._stop = threading.Event()
        self._look()
        threading.Thread(target=self._poll, name="vm_stat", daemon=True).start()

    def __call__(self) -> MemoryReading:
        found = self._collector()
        if self._said is None or self._missed >= STALE_READINGS:
            return found
        available, wired = self._said
        return replace(found, available_bytes=min(available, found.total_bytes), wired_bytes=wired)

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()

    def _poll(self) -> None:
        while not self._stop.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        said = parse_vm_stat(self._run(), self._collector().total_bytes)
        if said is None:
            self._missed += 1
        else:
            self._said, self._missed = said, 0
