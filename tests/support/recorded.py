"""The readings of other machines in tests/machine/recorded, as files and texts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

RECORDED = Path(__file__).resolve().parents[1] / "machine" / "recorded"


def plant(root: Path, name: str) -> Path:
    """Write the tree of a recorded .sysfs file below root."""
    for line in (RECORDED / name).read_text().splitlines():
        path, _, content = line.partition(" ")
        write(root, path, content)
    return root


def write(root: Path, path: str, content: str) -> None:
    """One file of such a tree; a content with escapes is bytes."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode().decode("unicode_escape").encode("latin-1") if "\\x" in content else f"{content}\n".encode()
    file.write_bytes(raw)


@contextlib.contextmanager
def machine_that_draws(root: Path, watts: float) -> Iterator[Path]:
    """A tree for --sysfs of a machine with an AMD processor, whose counter of energy rises with the time."""
    plant(root, "amd-apu.sysfs")
    stop, scratch = threading.Event(), root / "counter"

    def run() -> None:
        began = time.monotonic()
        while not stop.wait(0.02):
            scratch.write_text(str(int(1e6 * watts * (time.monotonic() - began)) + 1))
            scratch.rename(root / "class/powercap/intel-rapl:0/energy_uj")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield root
    finally:
        stop.set()
        thread.join()
