"""Measures how soon nodes that start at the same time are one mesh, while each core is busy with other work.

`python -m tools.bench at-once --nodes 24 --busy 2`

All nodes of this machine start together, beside `--busy` processes that compute without end. Two times are printed:
until every node is ready, and until each of them sees all others as alive.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import Any

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.errors import DeadlineError, MeshError
from tools.bench.sides import hogs

READY_S, JOIN_S = 300.0, 120.0
BAR_S = 30.0
"""From the moment in which the last node is ready."""
POLL_S = 0.25


def wait_for_one_mesh(mesh: LocalMesh, begin: float) -> None:
    """Waits until each node sees all others as alive. Raises DeadlineError after JOIN_S."""
    waiting = list(range(len(mesh.children)))
    while waiting:
        if time.monotonic() - begin > JOIN_S:
            raise DeadlineError(
                f"{len(waiting)} of {len(mesh.children)} nodes do not see all others after {JOIN_S:g} s"
            )
        with contextlib.suppress(MeshError):
            peers = mesh.client(waiting[0]).get("/state")["view"]["peers"]
            if sum(peer["alive"] for peer in peers) >= len(mesh.children):
                waiting.pop(0)
                continue
        time.sleep(POLL_S)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("at-once", help="nodes that start at once on busy cores", description=__doc__)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="busy processes (default: one for each core)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    with hogs(args.busy), local_mesh(args.nodes, ["--engine", "dummy"], "at-once", api_port=0) as mesh:
        for child in mesh.children:
            child.wait_ready(READY_S)
        ready = time.monotonic()
        print(f"{args.nodes} nodes are ready after {ready - begin:.1f} s", flush=True)
        wait_for_one_mesh(mesh, ready)
        joined_s = time.monotonic() - ready
        logs = [child.log for child in mesh.children]
    wrong = sum(log.count(" is dead") for log in logs)
    print(f"one mesh {joined_s:.1f} s later; the bar is {BAR_S:g} s. {wrong} log lines take a living node for dead")
    return int(joined_s > BAR_S)
