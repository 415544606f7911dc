"""Checks whether there is memory for heavy tests. Run it before them: `python -m tools.preflight && pytest -m slow`.

python -m tools.preflight [--need-gb N] [--force]    exit 1 if the memory is missing; --force, or PREFLIGHT_FORCE=1,
                                                     prints the same and exits 0

Without this a heavy test on a machine that is short of memory swaps for minutes, or the system kills some process.
The heavy tests ask by themselves as well, each for what it needs itself: see tests/support/heavy.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from exo_mesh.machine.memory import read_memory

NEED_BYTES = 5 * 10**9
"""What the heaviest slow test needs: meshes/test_recovery.py, with 1.6 GB of weights that NumPy holds as 3.2 GB."""

LEAKED_WIRED_BYTES = 5 * 10**9
"""macOS may keep the wired memory of a process that died inside Metal until the machine restarts. More wired memory
than this without an exo-mesh process is such a leak: an idle Mac has 2 to 4 GB."""

FORCE = "PREFLIGHT_FORCE"

MODULES = ("exo_mesh.rings.runner", "exo_mesh.cli.main")
"""Parts of the command lines of nodes and runners."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A running process of exo-mesh."""

    pid: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The machine's current memory. wired_bytes: only macOS reports it; elsewhere 0."""

    total_bytes: int
    available_bytes: int
    wired_bytes: int = 0
    holders: tuple[Holder, ...] = ()


def read() -> Reading:
    """Reads it from the system."""
    memory = read_memory()
    wired_bytes = int(getattr(psutil.virtual_memory(), "wired", 0))
    return Reading(memory.total_bytes, memory.available_bytes, wired_bytes, tuple(_holders()))


def _holders() -> Iterator[Holder]:
    for process in psutil.process_iter(["pid", "cmdline", "memory_info"]):
        if set(MODULES) & set(process.info["cmdline"] or ()) and process.info["memory_info"] is not None:
            yield Holder(process.info["pid"], process.info["memory_info"].rss)


def refusal(reading: Reading, need_bytes: int) -> str:
    """Says why a test that needs this much memory must not start now, with the numbers; "" if it may. Pure."""
    if reading.wired_bytes > LEAKED_WIRED_BYTES and not reading.holders:
        return (
            f"{_gb(reading.wired_bytes)} are wired and no process of exo-mesh runs: memory has leaked, and only a "
            "restart of the machine gives it back"
        )
    if reading.available_bytes >= need_bytes:
        return ""
    message = (
        f"{_gb(need_bytes)} of memory are needed, and {_gb(reading.available_bytes)} of {_gb(reading.total_bytes)} "
        "are free"
    )
    if reading.holders:
        held_bytes = sum(holder.rss_bytes for holder in reading.holders)
        pids = ", ".join(str(holder.pid) for holder in reading.holders)
        message += f"; exo-mesh processes hold {_gb(held_bytes)}, maybe left over from an earlier run: {pids}"
    return message


def is_forced(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks to continue regardless of memory."""
    return environ.get(FORCE, "") not in ("", "0")


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Prints OK or the refusal; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.preflight", description="check the memory for heavy tests")
    parser.add_argument("--need-gb", type=float, default=NEED_BYTES / 1e9, help="memory in GB (default: %(default)g)")
    parser.add_argument("--force", action="store_true", help=f"exit 0 even if memory is missing; {FORCE}=1 does it too")
    args = parser.parse_args(argv)
    reading = read()
    if not (reason := refusal(reading, round(args.need_gb * 1e9))):
        print(f"OK: {_gb(reading.available_bytes)} of {_gb(reading.total_bytes)} are free, {args.need_gb:g} GB needed")
        return 0
    if args.force or is_forced(environ):
        print(f"continuing as requested, although {reason}")
        return 0
    print(f"refused: {reason}. --force continues anyway.", file=sys.stderr)
    return 1


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


if __name__ == "__main__":
    sys.exit(main())
