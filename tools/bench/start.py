"""CPU time and memory of a node and a runner that start: `python -m tools.bench start --against OTHER_CHECKOUT`.

A node with the dummy engine starts, rests, answers its first request, starts a runner for the demo model, and answers
its first chat. With --against the same is done with the code of another checkout in turns. CPU seconds are user and
system time of the one process, from its spawn to the event "ready" (node) or until the placement is answered (runner).
PSS is the memory of the node alone, without its children. The first round only writes the bytecode and is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.errors import InputError
from tools.bench.sides import add_against, cpu_s, node_of, sides

MODEL = "exo-mesh-demo"
REST_S = 3.0
"""Time between "ready" and the reading of the memory: late parts of the start end, and threads give memory back."""
REQUEST_S = 60.0
MB = 1e6


@dataclass(frozen=True)
class Start:
    """Figures of one start. The *_ms of requests are wall time at the client, the *_cpu_ms CPU time of the node."""

    node_cpu_s: float
    node_wall_s: float
    idle_pss_mb: float
    models_ms: float
    models_cpu_ms: float
    runner_cpu_s: float
    place_cpu_ms: float
    chat_ms: float
    chat_cpu_ms: float
    used_pss_mb: float
    runner_pss_mb: float


def pss_mb(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss) / MB


def once(python: Path, checkout: Path, flags: Sequence[str]) -> Start:
    """Starts a node, and asks it for the first time."""
    began = time.monotonic()
    with node_of(checkout, flags, python) as child:
        wall_s, node = time.monotonic() - began, psutil.Process(child.pid)
        node_cpu_s = cpu_s(node)
        time.sleep(REST_S)
        idle_pss_mb = pss_mb(node)
        api = child.api
        models_ms, models_cpu_ms = _timed(node, lambda: api.get("/v1/models"))
        _, place_cpu_ms = _timed(node, lambda: api.post("/instance", {"model": MODEL}, REQUEST_S))
        (runner,) = child.runners()
        runner_cpu_s = cpu_s(runner)
        chat_ms, chat_cpu_ms = _timed(node, lambda: _chat(api))
        return Start(
            node_cpu_s=node_cpu_s,
            node_wall_s=wall_s,
            idle_pss_mb=idle_pss_mb,
            models_ms=models_ms,
            models_cpu_ms=models_cpu_ms,
            runner_cpu_s=runner_cpu_s,
            place_cpu_ms=place_cpu_ms,
            chat_ms=chat_ms,
            chat_cpu_ms=chat_cpu_ms,
            used_pss_mb=pss_mb(node),
            runner_pss_mb=pss_mb(runner),
        )


def _chat(api: ApiClient) -> Any:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Count from 7 to 20."}], "max_tokens": 4}
    return api.post("/v1/chat/completions", asked, REQUEST_S)


def _timed(node: psutil.Process, call: Any) -> tuple[float, float]:
    """Milliseconds that a call takes here, and of CPU time in the node."""
    used_s, began = cpu_s(node), time.monotonic()
    call()
    took_s = time.monotonic() - began
    return took_s * 1e3, (cpu_s(node) - used_s) * 1e3


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("start", help="CPU time and memory of a start", description=__doc__)
    add_against(parser)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter of both")
    parser.add_argument("--discovery", default="none", help="setting of the nodes; none adds no peer of the network")
    parser.add_argument("--engine", default="dummy")
    parser.add_argument("--rounds", type=int, default=11)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the table."""
    if args.rounds < 1:
        raise InputError("start needs a round")
    flags = ["--discovery", args.discovery, "--engine", args.engine, "--namespace", f"start-{os.getpid()}"]
    checkouts = sides(args.against)
    runs: dict[str, list[Start]] = {side: [] for side in checkouts}
    for number in range(args.rounds + 1):
        for side, checkout in checkouts.items():
            figures = once(args.python, checkout, flags)
            if number:
                runs[side].append(figures)
    print(f"medians of {args.rounds} rounds: {', '.join(checkouts)}{', median of the ratios' if args.against else ''}")
    for place, field in enumerate(fields(Start)):
        columns = [[astuple(figures)[place] for figures in given] for given in runs.values()]
        line = "".join(f"{statistics.median(column):10.3f}" for column in columns)
        ratios = [this / against for this, against in zip(*columns, strict=True) if against] if args.against else []
        print(f"{field.name:14}{line}{f'{statistics.median(ratios):8.2f} x' if ratios else ''}")
    return 0
