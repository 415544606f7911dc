"""`exo-mesh bench serve`: how many requests a ring serves at once, and how they feel.

Starts a mesh of real nodes on this machine (or takes one that runs: --url), asks through the HTTP API, and reports for
each number of streams: tokens a second of all together, time to the first token, time between tokens, and how busy each
stage was. The rest of a stage's time, in which it waits for frames, is the bubble.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exo_mesh.cli.client import ApiClient
from exo_mesh.cli.load import LoadResult, Question, closed_loop, open_loop
from exo_mesh.cli.local_mesh import LocalMesh, local_mesh
from exo_mesh.cli.tables import columns
from exo_mesh.config import ConfigError

LOAD_DEADLINE_S = 600.0
MODEL = "exo-mesh-demo"
WARM_UP_TOKENS = 16


def add_parser(subparsers: Any) -> None:
    """Add `serve` to the verbs of `exo-mesh bench`."""
    parser = subparsers.add_parser("serve", help="requests at once, over real nodes", description=__doc__)
    parser.add_argument("--peers", type=int, default=2, metavar="N", help="nodes, one stage each (default 2)")
    parser.add_argument("--url", default="", metavar="URL", help="measure this mesh instead of starting one")
    parser.add_argument("--engine", default="auto", metavar="NAME", help="engine of the stages")
    parser.add_argument("--engine-option", action="append", default=[], metavar="K=V", help="a setting of the engine")
    parser.add_argument("--model", default=MODEL, metavar="MODEL", help=f"model or directory (default {MODEL})")
    parser.add_argument("--streams", default="1,2,4,8", metavar="N,…", help="requests at once (default 1,2,4,8)")
    parser.add_argument("--rate", type=float, metavar="R", help="instead: R requests a second, answered or not")
    parser.add_argument("--requests", type=int, metavar="N", help="requests of a run (default: two for each stream)")
    parser.add_argument("--prompt", type=int, default=32, metavar="N", help="letters of a prompt (default 32)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    parser.add_argument("--pin", action="store_true", help="stage i computes on core i only (Linux)")
    parser.add_argument("--against-one", action="store_true", help="the same with one node, and the ratio")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the bench and print its figures."""
    args.models_dir = ""
    if not args.url and (directory := Path(args.model).expanduser()).is_dir():
        # only a name means the same model to every peer
        args.models_dir, args.model = str(directory.resolve().parent), directory.resolve().name
    result: dict[str, Any] = {"peers": args.peers, "model": args.model, "cores": os.cpu_count()}
    result["runs"] = _measure_url(args) if args.url else _measure_mesh(args, args.peers)
    if args.against_one and not args.url:
        result["one"] = _measure_mesh(args, 1)
        for many, one in zip(result["runs"], result["one"], strict=True):
            many["against_one"] = round(many["tokens_per_s"] / one["tokens_per_s"], 3)
    print(json.dumps(result, indent=2) if args.json else _text(result))
    return 0


def _measure_url(args: argparse.Namespace) -> list[dict[str, Any]]:
    mesh = LocalMesh(ready=[{"api_url": args.url}])
    return _runs(args, mesh)


def _measure_mesh(args: argparse.Namespace, peers: int) -> list[dict[str, Any]]:
    flags = ["--engine", args.engine]
    if args.models_dir:
        flags += ["--models-dir", args.models_dir]
    for option in args.engine_option:
        flags += ["--engine-option", option]
    with local_mesh(peers, flags, "bench", api_port=0) as mesh:
        mesh.wait_until_joined()
        body = {"model": args.model, "min_peers": peers}
        instance = mesh.client().post("/instance", body, LOAD_DEADLINE_S)
        if args.pin:
            _pin([stage["pid"] for stage in instance["stages"]])
        return _runs(args, mesh)


def _pin(pids: Sequence[int]) -> None:
    """Every thread of stage i to one core, so that a stage is one core's worth of machine and no more."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--pin: this system cannot pin a process to a core")
    cores = sorted(os.sched_getaffinity(0))
    for index, pid in enumerate(pids):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {cores[index % len(cores)]})


def _runs(args: argparse.Namespace, mesh: LocalMesh) -> list[dict[str, Any]]:
    warm_up = Question(args.model, args.prompt, WARM_UP_TOKENS)
    asyncio.run(closed_loop(mesh.api_urls, warm_up, 2, 4))
    if args.rate:
        return [_run(args, mesh, args.rate, args.requests or 32, is_rate=True)]
    return [_run(args, mesh, count, args.requests or 2 * count) for count in _counts(args.streams)]


def _run(
    args: argparse.Namespace, mesh: LocalMesh, load: float, requests: int, *, is_rate: bool = False
) -> dict[str, Any]:
    question = Question(args.model, args.prompt, args.tokens)
    before, began = _busy(mesh), time.monotonic()
    if is_rate:
        result: LoadResult = asyncio.run(open_loop(mesh.api_urls, question, load, requests))
    else:
        result = asyncio.run(closed_loop(mesh.api_urls, question, int(load), requests))
    elapsed_s = time.monotonic() - began
    busy = [(after - was) / elapsed_s for was, after in zip(before, _busy(mesh), strict=False)]
    figures = result.describe()
    return {("rate" if is_rate else "streams"): load, **figures, "busy": [round(share, 3) for share in busy]}


def _busy(mesh: LocalMesh) -> list[float]:
    """Seconds that each stage has spent in its engine, as the metrics of its node say, in the order of the nodes."""
    found = []
    for index in range(len(mesh.ready)):
        text = ApiClient(mesh.api_urls[index]).text("/metrics")
        lines = [line for line in text.splitlines() if line.startswith("exo_mesh_stage_busy_seconds_total{")]
        found += [float(line.rsplit(" ", 1)[1]) for line in lines]
    return found


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or max(counts) > 1024:
        raise ConfigError(f"--streams {text}: whole numbers from 1 to 1024 are needed, separated by commas")
    return counts


def _text(result: dict[str, Any]) -> str:
    header = ["streams", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "busy", "failed"]
    rows: list[list[object]] = []
    for run in result["runs"]:
        busy = " ".join(f"{share:.0%}" for share in run["busy"])
        row: list[object] = [run.get("streams", f"{run.get('rate')}/s"), f"{run['tokens_per_s']:.1f}"]
        row += [
            _ms(run["ttft_s"], "p50"),
            _ms(run["ttft_s"], "p99"),
            _ms(run["itl_s"], "p50"),
            _ms(run["itl_s"], "p99"),
        ]
        row += [busy, run["failed"]]
        row += [f"{run['against_one']:.2f} x one"] if "against_one" in run else []
        rows.append(row)
    return columns(header + (["ratio"] if "one" in result else []), rows)


def _ms(quantiles: dict[str, float], name: str) -> str:
    return f"{quantiles[name] * 1e3:.1f} ms" if quantiles else "-"
