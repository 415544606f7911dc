"""Measures how soon nodes that start at the same time are one mesh, while each core is busy with other work.

`python -m tools.bench at-once --nodes 24 --busy 2`

All nodes of this machine start together, beside `--busy` processes that compute without end. Two times are printed:
until every node is ready, and until each of them sees all others as alive.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from exo_mesh.cli.client.local_mesh import await_joined, local_mesh
from tools.bench.sides import hogs

READY_S, JOIN_S = 300.0, 120.0
BAR_S = 30.0
"""From the moment in which the last node is ready."""


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
        await_joined(mesh.children, args.nodes, JOIN_S)
        joined_s = time.monotonic() - ready
        logs = [child.log for child in mesh.children]
    wrong = sum(log.count(" is dead") for log in logs)
    print(f"one mesh {joined_s:.1f} s later; the bar is {BAR_S:g} s. {wrong} log lines take a living node for dead")
    return int(joined_s > BAR_S)
