"""How long a stream is silent when the owner of a new ring is killed: `python -m tools.bench early-kill --engine mlx`.

Three nodes start on this machine. The first places the demo model over two of them, itself included, so it owns the
ring. It is killed as soon as a stream at the last node, which may hold no layers, has TOKENS chunks. Each round does
this without a spare runner and with one (`--spare-runners`). The silence includes the time to detect the loss.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from itertools import pairwise
from typing import Any

from exo_mesh.cli.client.local_mesh import await_joined, local_mesh
from exo_mesh.cli.tables import print_json
from exo_mesh.errors import InputError

MODEL = "exo-mesh-demo"
TOKENS = 8
ASKED = {
    "model": MODEL,
    "stream": True,
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "Count from 3 to 90."}],
}
PLACING_S = 120.0


def add_parser(subparsers: Any) -> None:
    """Adds `early-kill` to the verbs of `python -m tools.bench`."""
    text = "how long a stream is silent when the owner of a new ring is killed"
    parser = subparsers.add_parser("early-kill", help=text, description=__doc__)
    parser.add_argument("--engine", default="numpy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line for each start."""
    if args.rounds < 1:
        raise InputError("early-kill needs a round")
    found = [once(args.engine, spares) for _ in range(args.rounds) for spares in (0, 1)]
    if args.json:
        print_json(found)
    for one in found if not args.json else ():
        print(
            "{spares} spares: ring ready after {ready_s:.2f} s, killed after {killed_s:.2f} s, ".format_map(one), end=""
        )
        print("silent for {silent_s:.2f} s of {chunks} chunks".format_map(one))
    return 0


def once(engine: str, spares: int) -> dict[str, float]:
    """One mesh. ready_s, killed_s: since the nodes were started."""
    flags = ["--engine", engine, "--open-admin", "--spare-runners", str(spares)]
    began = time.monotonic()
    with local_mesh(3, flags, "early-kill", api_port=0) as mesh:
        mesh.wait_until_joined()
        await_joined(mesh.children, 3)
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, PLACING_S)
        ready_s, killed_s = time.monotonic() - began, 0.0
        times: list[float] = []
        for _ in mesh.client(2).stream("/v1/chat/completions", ASKED):
            times.append(time.monotonic())
            if len(times) == TOKENS:
                os.killpg(mesh.children[0].pid, signal.SIGKILL)
                killed_s = time.monotonic() - began
    silent_s = max(later - earlier for earlier, later in pairwise(times))
    return {"spares": spares, "ready_s": ready_s, "killed_s": killed_s, "silent_s": silent_s, "chunks": len(times)}
