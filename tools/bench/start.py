"""CPU time and memory of a node and a runner that start: `python -m tools.bench start --against OTHER_CHECKOUT`.

A node with the dummy engine starts, rests, answers its first request, starts a runner for the demo model, and answers
its first chat. With --against the same is done with the code of another checkout in turns. CPU seconds are user and
system time of the one process, from its spawn to the event "ready" (node) or until the placement is answered (runner).
PSS is the memory of the node alone, without its children. The first round only writes the bytecode and is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import client_of
from exo_mesh.errors import InputError, MeshError

MODEL = "exo-mesh-demo"
REST_S = 3.0
"""Time between "ready" and the reading of the memory: late parts of the start end, and threads give memory back."""
REQUEST_S = 60.0
STOP_S = 10.0
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


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def pss_mb(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss) / MB


@contextlib.contextmanager
def started(python: Path, checkout: Path, flags: Sequence[str]) -> Iterator[tuple[psutil.Process, float, Any]]:
    """A node of the checkout's code: its process, its wall seconds to "ready", and that event.

    Variables of Python are left out of its environment, because some turn off bytecode files.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("EXO_MESH_", "PYTHON"))}
    environ["PYTHONPATH"] = f"{checkout}{os.pathsep}{checkout / 'engines'}"
    with tempfile.TemporaryDirectory(prefix="exo-mesh-start-") as home:
        own = ["--home", home, "--host", "127.0.0.1", "--grpc-port", "0", "--api-port", "0", "--log-format", "json"]
        command = [str(python), "-m", "exo_mesh.cli.main", "serve", *own, *flags, "--until-stdin-closes"]
        began = time.monotonic()
        # a pipe, because its reader sees the event at once and the CPU time of what follows is not counted
        with subprocess.Popen(
            command, cwd=checkout, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as child:
            try:
                process = psutil.Process(child.pid)
                ready = _ready(child)
                yield process, time.monotonic() - began, {"tls_cert": None, **ready, "home": home}
            finally:
                assert child.stdin is not None, "it is a pipe"
                child.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(STOP_S)
                child.kill()


def _ready(child: subprocess.Popen[bytes]) -> Mapping[str, Any]:
    """The event "ready" of a node. Raises MeshError with its output if it ends before."""
    assert child.stdout is not None, "it is a pipe"
    lines = []
    for line in child.stdout:
        lines.append(line.decode(errors="replace"))
        if line.startswith(b'{"event"') and (event := json.loads(line))["event"] == "ready":
            found: Mapping[str, Any] = event
            return found
    raise MeshError(f"the node ended before it was ready:\n{''.join(lines[-20:])}")


def once(python: Path, checkout: Path, flags: Sequence[str]) -> Start:
    """Starts a node, and asks it for the first time."""
    with started(python, checkout, flags) as (node, wall_s, ready):
        node_cpu_s = cpu_s(node)
        time.sleep(REST_S)
        idle_pss_mb = pss_mb(node)
        api = client_of(ready)
        models_ms, models_cpu_ms = _timed(node, lambda: api.get("/v1/models"))
        _, place_cpu_ms = _timed(node, lambda: api.post("/instance", {"model": MODEL}, REQUEST_S))
        runner = next(child for child in node.children() if "exo_mesh.rings.runner" in child.cmdline())
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
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure its code in turns with this one's")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the interpreter of both")
    parser.add_argument("--discovery", default="none", help="setting of the nodes; none adds no peer of the network")
    parser.add_argument("--engine", default="dummy")
    parser.add_argument("--rounds", type=int, default=11)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the table."""
    if args.rounds < 1:
        raise InputError("start needs a round")
    sides = {"this": Path(__file__).parents[2]}
    if args.against:
        sides["against"] = args.against.resolve()
    flags = ["--discovery", args.discovery, "--engine", args.engine, "--namespace", f"start-{os.getpid()}"]
    runs: dict[str, list[Start]] = {side: [] for side in sides}
    for number in range(args.rounds + 1):
        for side, checkout in sides.items():
            figures = once(args.python, checkout, flags)
            if number:
                runs[side].append(figures)
    print(f"medians of {args.rounds} rounds: {', '.join(sides)}{', median of the ratios' if args.against else ''}")
    for place, field in enumerate(fields(Start)):
        columns = [[astuple(figures)[place] for figures in given] for given in runs.values()]
        line = "".join(f"{statistics.median(column):10.3f}" for column in columns)
        ratios = [this / against for this, against in zip(*columns, strict=True) if against] if args.against else []
        print(f"{field.name:14}{line}{f'{statistics.median(ratios):8.2f} x' if ratios else ''}")
    return 0
