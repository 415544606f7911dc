"""Measures memory and CPU of idle nodes.

`python -m tools.bench idle --nodes 8 --minutes 120`

A mesh on this machine answers one request, so that its ring exists, and is then idle. The resident memory of each node
with all its children is read every minute. The slope is that of a least-squares line through the readings after the
first quarter, in which caches fill.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import psutil

from exo_mesh.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.errors import MeshError

MODEL = "exo-mesh-demo"
MAX_SLOPE_MB_PER_H = 1.0
MB = 1e6


@dataclass(slots=True)
class IdleNode:
    """Readings of a node with all its children. minutes: of each reading since the first; cpu_s: used so far."""

    pid: int
    minutes: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)
    pss_mb: float = 0.0
    processes: int = 0

    def read(self, minute: float) -> None:
        """Reads the node's memory and CPU. Raises MeshError if the node is gone."""
        try:
            node = psutil.Process(self.pid)
            family = [node, *node.children(recursive=True)]
            times = [process.cpu_times() for process in family]
            self.rss_mb.append(sum(process.memory_info().rss for process in family) / MB)
            self.wakes.append(sum(num_wakes(process.pid) for process in family))
            self.pss_mb = node.memory_full_info().pss / MB
        except psutil.NoSuchProcess as exc:
            raise MeshError(f"a process of the node {self.pid} has ended while it was idle") from exc
        self.minutes.append(minute)
        self.cpu_s.append(sum(one.user + one.system for one in times))
        self.processes = len(family)

    @property
    def slope_mb_per_h(self) -> float:
        """Slope of the memory after the first quarter of the readings; at least two readings are needed there."""
        begin = len(self.minutes) // 4
        return linear_regression(self.minutes[begin:], self.rss_mb[begin:]).slope * 60

    @property
    def cpu_percent(self) -> float:
        """CPU use in percent of one core, over all readings."""
        return (self.cpu_s[-1] - self.cpu_s[0]) / ((self.minutes[-1] - self.minutes[0]) * 60) * 100

    @property
    def wakes_per_s(self) -> float:
        """Times that a thread of the node or its children began to run after it had waited, over all readings."""
        return (self.wakes[-1] - self.wakes[0]) / ((self.minutes[-1] - self.minutes[0]) * 60)


def num_wakes(pid: int) -> int:
    """Voluntary context switches of all threads of a process so far; Linux only."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            lines = status.read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return total


def measure(mesh: LocalMesh, minutes: int) -> list[IdleNode]:
    """Watches all nodes for this many minutes."""
    nodes = [IdleNode(child.pid) for child in mesh.children]
    begin = time.monotonic()
    for minute in range(minutes + 1):
        time.sleep(max(0.0, begin + minute * 60 - time.monotonic()))
        for node in nodes:
            node.read((time.monotonic() - begin) / 60)
    return nodes


def report(nodes: list[IdleNode]) -> str:
    """Formats a line for each node."""
    return "\n".join(
        f"node {number}: {node.rss_mb[0]:.1f} -> {node.rss_mb[-1]:.1f} MB in {node.minutes[-1]:.0f} min, "
        f"{node.slope_mb_per_h:+.2f} MB/h, {node.cpu_percent:.2f} % of a core, {node.wakes_per_s:.0f} wake-ups/s, "
        f"PSS {node.pss_mb:.0f} MB without its {node.processes - 1} other processes"
        for number, node in enumerate(nodes, 1)
    )


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("idle", help="memory and CPU of idle nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--engine", default="numpy")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    flags = ["--engine", args.engine, "--min-peers", "2"]
    with local_mesh(args.nodes, flags, "idle", api_port=0) as mesh:
        mesh.wait_until_joined()
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "Count from 7 to 20."}]}
        mesh.client().post("/v1/chat/completions", asked, 120.0)
        nodes = measure(mesh, args.minutes)
    print(report(nodes))
    worst = max(node.slope_mb_per_h for node in nodes)
    print(f"steepest: {worst:+.2f} MB/h; the bar is {MAX_SLOPE_MB_PER_H:g}")
    return int(worst >= MAX_SLOPE_MB_PER_H)
