"""`python -m tools.bench collectives` times all-reduce, send and receive between the ranks of a group, by size.

Every result is compared with what it must be. Without --rank it starts --ranks processes on this machine that meet over
TCP. With --rank it is one rank: `mlx.launch --hostfile hosts.json -- python -m tools.bench collectives --rank` measures
the cables between Macs, with the backend of that file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from exo_mesh.base.telemetry.tables import columns, human_bytes
from exo_mesh.cli.bench.engines import count
from exo_mesh.cli.bench.local_ring import free_endpoints
from exo_mesh.cli.tables import print_json
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import EngineError, InputError
from exo_mesh.rings.runner.group.ranks import RankFiles

START_S = 60.0
MAX_BYTES = 1 << 30
MIN_CALLS = 5
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TCP_WIRING = "EXO_MESH_BENCH_RANK"
"""For ranks that this module starts itself: rank and addresses, as JSON."""


def add_parser(subparsers: Any) -> None:
    """Adds `collectives` to the verbs of `python -m tools.bench`."""
    parser = subparsers.add_parser("collectives", help="all-reduce, send and receive between ranks, by size")
    parser.add_argument("--ranks", type=count(8), default=2, metavar="N", help="ranks on this machine, 2 to 8 (2)")
    parser.add_argument("--sizes", default="4K,64K,1M,16M", metavar="LIST", help="sizes of messages (4K,64K,1M,16M)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="how long each is repeated (1)")
    parser.add_argument("--rank", action="store_true", help="be one rank, as mlx.launch starts it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; exit code 1 if a result was wrong."""
    sizes = [parse_bytes(text) for text in args.sizes.split(",")]
    if args.rank:
        figures = measure(sizes, args.seconds)
        if not figures:
            return 0  # only rank 0 prints
    elif args.ranks < 2:
        raise InputError("a tensor group has at least two ranks", param="ranks")
    else:
        figures = over_tcp(args.ranks, args.sizes, args.seconds, START_S + 6 * args.seconds * len(sizes))
    print_json(figures) if args.json else print(text_of(figures))
    return 1 if figures["wrong"] else 0


def parse_bytes(text: str) -> int:
    """Parses "64K" or "16M" to bytes, at least four. Raises InputError."""
    found = re.fullmatch(r"(\d{1,10})([KMG]?)", text.strip().upper())
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 4 <= size <= MAX_BYTES:
        raise InputError(f"{text!r} is not a size from 4 to 1G, such as 64K", param="sizes")
    return size


def over_tcp(ranks: int, sizes: str, seconds: float, deadline_s: float) -> dict[str, Any]:
    """Starts the ranks on this machine; returns rank 0's figures. Raises EngineError if they do not end in time."""
    endpoints = free_endpoints(ranks)
    command = [sys.executable, "-m", "tools.bench", "collectives", "--rank", "--json"]
    command += ["--sizes", sizes, "--seconds", str(seconds)]
    with contextlib.ExitStack() as stack:
        children = []
        for rank in range(ranks):
            environ = {**os.environ, _TCP_WIRING: json.dumps([rank, endpoints])}
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            child = stack.enter_context(subprocess.Popen(command, env=environ, stdout=out, text=True))
            stack.callback(child.kill)
            children.append(child)
        try:
            printed, _ = children[0].communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise EngineError(f"the ranks did not end within {deadline_s:.0f} s") from None
    try:
        figures: dict[str, Any] = json.loads(printed)
    except ValueError:
        raise EngineError("a rank failed; its output is above") from None
    return figures


def measure(sizes: list[int], seconds: float) -> dict[str, Any]:
    """Runs one rank. Rank 0 returns the figures, the others {}. Raises EngineError if there is no group."""
    files = RankFiles()
    if wiring := os.environ.get(_TCP_WIRING):
        rank, endpoints = json.loads(wiring)
        files.write(RankWiring("ring", rank, tuple(endpoints)))
    import mlx.core as mx

    group = mx.distributed.init(strict=True, backend="jaccl" if "MLX_IBV_DEVICES" in os.environ else "ring")
    files.remove()
    ranks, own = group.size(), group.rank()
    if ranks < 2:
        raise EngineError("this process is alone: start it with mlx.launch and a hostfile of at least two hosts")
    expected, rows, wrong = ranks * (ranks + 1) / 2, [], 0

    def reduce_once(values: Any) -> Any:
        return mx.distributed.all_sum(values, group=group, stream=mx.cpu)

    def pass_once(values: Any) -> Any:
        """Sends from rank 0 to rank 1 and back."""
        if own == 0:
            mx.eval(mx.distributed.send(values, 1, group=group, stream=mx.cpu))
            return mx.distributed.recv_like(values, 1, group=group, stream=mx.cpu)
        back = mx.distributed.recv_like(values, 0, group=group, stream=mx.cpu)
        return mx.distributed.send(back, 0, group=group, stream=mx.cpu)

    def agreed(number: int) -> int:
        """Returns how often rank 0 wants to repeat, because every rank must do the same."""
        mine = mx.array([number if own == 0 else 0], dtype=mx.int32)
        return int(reduce_once(mine).item())

    def timed(call: Callable[[Any], Any], values: Any) -> tuple[list[float], Any]:
        times: list[float] = []
        result = None
        pilot = _seconds_of(mx, call, values)
        for _ in range(agreed(max(MIN_CALLS, min(100_000, int(seconds / max(pilot, 1e-6)))))):
            start = time.perf_counter()
            result = call(values)
            mx.eval(result)
            times.append(time.perf_counter() - start)
        return times, result

    for size in sizes:
        values = mx.full((size // 4,), float(own + 1), dtype=mx.float32)
        mx.eval(values)
        reduce_s, total = timed(reduce_once, values)
        wrong += int(not mx.all(total == expected).item())
        pass_s: list[float] = []
        if own < 2:
            # the others wait in the next all-reduce
            pass_s, came_back = _passes(mx, pass_once, values, len(reduce_s))
            wrong += int(own == 0 and not mx.all(came_back == 1.0).item())
        rows.append(_row(size, reduce_s, pass_s))
    all_wrong = int(reduce_once(mx.array([wrong], dtype=mx.int32)).item())
    backend = "jaccl" if "MLX_IBV_DEVICES" in os.environ else "ring (TCP)"
    return {"ranks": ranks, "backend": backend, "wrong": all_wrong, "sizes": rows} if own == 0 else {}


def _row(size: int, reduce_s: list[float], pass_s: list[float]) -> dict[str, Any]:
    """The figures of messages of `size` bytes. reduce_s: seconds of each all-reduce; pass_s: of each way there and
    back, empty on ranks that take no part."""
    return {
        "bytes": size,
        "calls": len(reduce_s),
        "all_reduce_us": median(reduce_s) * 1e6,
        "all_reduce_bytes_per_s": size / median(reduce_s),
        "send_us": median(pass_s) / 2 * 1e6 if pass_s else None,
        "send_bytes_per_s": 2 * size / median(pass_s) if pass_s else None,
        "sustained_bytes_per_s": 2 * size * len(pass_s) / sum(pass_s) if pass_s else None,
    }


def _seconds_of(mx: Any, call: Callable[[Any], Any], values: Any) -> float:
    """Returns the seconds of one call, after a warm-up call."""
    mx.eval(call(values))
    start = time.perf_counter()
    mx.eval(call(values))
    return time.perf_counter() - start


def _passes(mx: Any, call: Callable[[Any], Any], values: Any, number: int) -> tuple[list[float], Any]:
    times, result = [], None
    for _ in range(number):
        start = time.perf_counter()
        result = call(values)
        mx.eval(result)
        times.append(time.perf_counter() - start)
    return times, result


def text_of(figures: dict[str, Any]) -> str:
    """Formats a row per size, and below it latency, peak and sustained bandwidth."""
    rows = [
        [
            human_bytes(row["bytes"]), row["calls"], f"{row['all_reduce_us']:.1f} us",
            f"{row['all_reduce_bytes_per_s'] / 1e9:.3f} GB/s", f"{row['send_us']:.1f} us",
            f"{row['send_bytes_per_s'] / 1e9:.3f} GB/s",
        ]
        for row in figures["sizes"]
    ]  # fmt: skip
    smallest = min(figures["sizes"], key=lambda row: row["bytes"])
    peak = max(row["send_bytes_per_s"] for row in figures["sizes"]) / 1e9
    sustained = max(row["sustained_bytes_per_s"] for row in figures["sizes"]) / 1e9
    right = "all results right" if not figures["wrong"] else f"{figures['wrong']} results WRONG"
    header = ("MESSAGE", "CALLS", "ALL-REDUCE", "", "SEND", "")
    return (
        f"{figures['ranks']} ranks, {figures['backend']}: {right}\n{columns(header, rows)}\n"
        f"latency {smallest['send_us']:.1f} us, bandwidth {peak:.2f} GB/s peak, {sustained:.2f} GB/s sustained"
    )
