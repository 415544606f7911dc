"""Nodes of this checkout and of another one, for benchmarks that measure both in turns."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from exo_mesh.cli.client.child_node import ChildNode, own_environ, running_node

EXACT_POLL_S = 0.005


def add_against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure its code in turns with this one's")


def sides(against: Path | None) -> dict[str, Path]:
    """The checkouts to measure, by the name in the output."""
    this = {"this": Path(__file__).parents[2]}
    return this | {"against": against.resolve()} if against else this


@contextlib.contextmanager
def node_of(checkout: Path, flags: Sequence[str], python: Path = Path(sys.executable)) -> Iterator[ChildNode]:
    """A node of the checkout's code, from the moment of its "ready" event.

    Variables of Python are left out of its environment, because some turn off bytecode files.
    """
    paths = f"{checkout}{os.pathsep}{checkout / 'engines'}"
    environ = {name: value for name, value in own_environ().items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as home:
        own = {"python": python, "directory": checkout}  # `python -m` searches the working directory first
        # nearly no CPU time is counted of what follows the event
        with running_node(Path(home), flags, {**environ, "PYTHONPATH": paths}, poll_s=EXACT_POLL_S, **own) as child:
            child.ready = {"tls_cert": None, **child.ready, "home": home}  # an older checkout does not report both
            yield child


def cpu_s(process: psutil.Process) -> float:
    """User and system time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def hogs(number: int) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Processes that compute until the end of the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.extend(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
