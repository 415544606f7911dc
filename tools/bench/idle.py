"""Measures memory, CPU and wake-ups of idle nodes.

`python -m tools.bench idle --nodes 8 --minutes 120`
`python -m tools.bench idle --nodes 2 --no-ring --seconds 120`

A mesh on this machine answers one request, so that its ring exists, and is then idle; with --no-ring it gets no
request. Each node is read alone, and its runners together with its other children. The resident memory of all of them
is read every minute, or four times in a shorter run. The slope is that of a least-squares line through the readings
after the first quarter, in which caches fill.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import psutil

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.errors import MeshError

MODEL = "exo-mesh-demo"
MAX_SLOPE_MB_PER_H = 1.0
MAX_CPU_PERCENT = 0.5
MAX_WAKES_PER_S = 20.0
MB = 1e6
LONGEST_STEP_S = 60.0
FEWEST_STEPS = 4
SETTLE_S = 45.0
"""Rest before the first reading: nodes measure their links, and gRPC closes connections and ends threads."""


@dataclass(slots=True)
class Use:
    """CPU time and wake-ups of some processes, at each reading since the first."""

    cpu_s: list[float] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)

    def read(self, processes: Sequence[psutil.Process]) -> None:
        """Raises psutil.NoSuchProcess if one of them is gone."""
        times = [process.cpu_times() for process in processes]
        self.cpu_s.append(sum(one.user + one.system for one in times))
        self.wakes.append(sum(num_wakes(process.pid) for process in processes))

    def cpu_percent(self, seconds: float) -> float:
        """CPU use in percent of one core, over all readings."""
        return (self.cpu_s[-1] - self.cpu_s[0]) / seconds * 100

    def wakes_per_s(self, seconds: float) -> float:
        """Times that a thread began to run after it had waited, over all readings."""
        return (self.wakes[-1] - self.wakes[0]) / seconds


@dataclass(slots=True)
class IdleNode:
    """Readings of a node. alone: of its own process; children: of its runners and its other children. minutes: of each
    reading since the first."""

    pid: int
    minutes: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    alone: Use = field(default_factory=Use)
    children: Use = field(default_factory=Use)
    pss_mb: float = 0.0
    num_children: int = 0

    def read(self, minute: float) -> None:
        """Reads the node's memory and CPU. Raises MeshError if the node or a child of it is gone."""
        try:
            node = psutil.Process(self.pid)
            children = node.children(recursive=True)
            self.rss_mb.append(sum(process.memory_info().rss for process in (node, *children)) / MB)
            self.alone.read([node])
            self.children.read(children)
            self.pss_mb = node.memory_full_info().pss / MB
        except psutil.NoSuchProcess as exc:
            raise MeshError(f"a process of the node {self.pid} has ended while it was idle") from exc
        self.minutes.append(minute)
        self.num_children = len(children)

    @property
    def seconds(self) -> float:
        """The time from the first to the last reading."""
        return (self.minutes[-1] - self.minutes[0]) * 60

    @property
    def slope_mb_per_h(self) -> float:
        """Slope of the memory after the first quarter of the readings; at least two readings are needed there."""
        begin = len(self.minutes) // 4
        return linear_regression(self.minutes[begin:], self.rss_mb[begin:]).slope * 60


def num_wakes(pid: int) -> int:
    """Voluntary context switches of all threads of a process so far; Linux only."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            lines = status.read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return total


def times_s(seconds: float) -> list[float]:
    """The times of the readings since the first one: every minute, and at least FEWEST_STEPS times after it."""
    steps = max(FEWEST_STEPS, round(seconds / LONGEST_STEP_S))
    return [seconds * step / steps for step in range(steps + 1)]


def measure(mesh: LocalMesh, seconds: float) -> list[IdleNode]:
    """Watches all nodes for this many seconds."""
    nodes = [IdleNode(child.pid) for child in mesh.children]
    begin = time.monotonic()
    for at_s in times_s(seconds):
        time.sleep(max(0.0, begin + at_s - time.monotonic()))
        for node in nodes:
            node.read((time.monotonic() - begin) / 60)
    return nodes


def report(nodes: Sequence[IdleNode]) -> Iterator[str]:
    """Yields a line for each node, one for all nodes, and one for the children of each node that has some."""
    for number, node in enumerate(nodes, 1):
        yield (
            f"node {number}: {node.rss_mb[0]:.1f} -> {node.rss_mb[-1]:.1f} MB in {node.seconds / 60:.1f} min, "
            f"PSS {node.pss_mb:.0f} MB without its {node.num_children} other processes; "
            f"alone {_use(node.alone, node.seconds)}"
        )
        if node.num_children:
            yield f"node {number}, its {node.num_children} other processes: {_use(node.children, node.seconds)}"
    cpu = [node.alone.cpu_percent(node.seconds) for node in nodes]
    wakes = [node.alone.wakes_per_s(node.seconds) for node in nodes]
    yield (
        f"nodes alone: mean {sum(cpu) / len(cpu):.2f} % (worst {max(cpu):.2f} %) of a core, the aim is "
        f"{MAX_CPU_PERCENT:g} %; mean {sum(wakes) / len(wakes):.0f} (worst {max(wakes):.0f}) wake-ups/s, the aim is "
        f"{MAX_WAKES_PER_S:g}"
    )


def _use(use: Use, seconds: float) -> str:
    return f"{use.cpu_percent(seconds):.2f} % of a core, {use.wakes_per_s(seconds):.0f} wake-ups/s"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("idle", help="memory, CPU and wake-ups of idle nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=120.0)
    length.add_argument("--seconds", type=float, help="measure for so long, and no slope of the memory")
    parser.add_argument("--no-ring", action="store_true", help="the mesh gets no request, and so has no ring")
    parser.add_argument(
        "--settle", type=float, default=SETTLE_S, metavar="SECONDS", help="rest before the first reading"
    )
    parser.add_argument("--engine", default="numpy")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    flags = ["--engine", args.engine, "--min-peers", "2"]
    with local_mesh(args.nodes, flags, "idle", api_port=0) as mesh:
        mesh.wait_until_joined()
        if not args.no_ring:
            asked = {"model": MODEL, "messages": [{"role": "user", "content": "Count from 7 to 20."}]}
            mesh.client().post("/v1/chat/completions", asked, 120.0)
        time.sleep(args.settle)
        nodes = measure(mesh, args.minutes * 60 if args.seconds is None else args.seconds)
    for line in report(nodes):
        print(line)
    if args.seconds is not None:
        return 0
    worst = max(node.slope_mb_per_h for node in nodes)
    print(f"steepest: {worst:+.2f} MB/h; the bar is {MAX_SLOPE_MB_PER_H:g}")
    return int(worst >= MAX_SLOPE_MB_PER_H)
