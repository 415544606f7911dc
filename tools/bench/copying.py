"""Measures how fast peers copy models from each other, and how that slows running streams.

    python -m tools.bench copy              our file server and client, open and with TLS, against a plain TCP copy
    python -m tools.bench copy --streams    time between tokens of a ring of nodes, while a copy runs and before

Both ends are on this machine. All ways take turns, and their ratios are of one round each. The plain copy is
socket.sendfile to a receiver that writes into a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.cli.bench.load import LoadResult, Question, closed_loop
from exo_mesh.cli.bench.measuring import LineChild
from exo_mesh.cli.client.local_mesh import local_mesh
from exo_mesh.errors import EngineError
from exo_mesh.security.secret import new_secret
from tools.bench.copy_child import FILE, copy_once, credentials, tls_of

NEEDED_SHARE, MOST_ITL_RATIO = 0.5, 1.3
PIECE_BYTES = 2**20
PLACE_DEADLINE_S = ANSWER_S = 60.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("copy", help="copies between peers", description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the file (default 1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", metavar="DIR", help="where the files are written (default: the usual temporary place)")
    parser.add_argument("--streams", type=int, nargs="?", const=4, metavar="N", help="measure N running streams (4)")
    parser.add_argument("--peers", type=int, default=2, help="of the ring (default 2)")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream (default 128)")
    parser.add_argument("--engine", default="dummy", help="of the ring; dummy waits, others compute (default dummy)")
    parser.add_argument("--cost-ms", type=float, default=10.0, help="of a dummy stage for a frame (default 10)")
    parser.add_argument("--unpaced", action="store_true", help="with --streams: copy as if no streams ran")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-", dir=args.dir) as scratch:
        place = Path(scratch)
        size = _write(place / "source", int(args.gb * 1e9))
        return _streams(args, place, size) if args.streams else _speed(args, place, size)


def _write(model_dir: Path, size: int) -> int:
    model_dir.mkdir()
    block = random.Random(0).randbytes(PIECE_BYTES)
    num_blocks = max(1, size // PIECE_BYTES)
    with (model_dir / FILE).open("wb") as stream:
        for _ in range(num_blocks):
            stream.write(block)
    return num_blocks * PIECE_BYTES


@contextlib.contextmanager
def _child(*words: str, secret: str = "") -> Iterator[LineChild]:
    command = [sys.executable, "-m", "tools.bench.copy_child", *words]
    with LineChild(command, "a process of the benchmark") as child:
        child.tell(secret)
        yield child


def _number(child: LineChild) -> int:
    return int(child.line(ANSWER_S))


def _end(reader: LineChild) -> int:
    reader.end()
    return _number(reader)


def _plain_copy(port: int, size: int, target: Path) -> None:
    buffer, received = memoryview(bytearray(PIECE_BYTES)), 0
    with socket.create_connection(("127.0.0.1", port)) as sock, target.open("wb", buffering=0) as stream:
        while num_bytes := sock.recv_into(buffer):
            stream.write(buffer[:num_bytes])
            received += num_bytes
    if received != size:
        raise EngineError(f"the plain copy has {received} of {size} bytes")


def _speed(args: argparse.Namespace, place: Path, size: int) -> int:
    """Runs the ways in rotation, prints the medians, and returns 0 if the open copy is fast enough."""
    secret, model_dir = new_secret(), place / "source"
    tls = tls_of(credentials(secret))
    with contextlib.ExitStack() as stack:
        plain = _number(stack.enter_context(_child("plain", str(model_dir / FILE))))
        opened = _number(stack.enter_context(_child("serve", str(model_dir))))
        closed = _number(stack.enter_context(_child("serve", str(model_dir), secret=secret)))
        ways: dict[str, Callable[[Path], None]] = {
            "plain TCP": lambda target: _plain_copy(plain, size, target),
            "file server, open": lambda target: copy_once(opened, size, target, None),
            "file server, TLS": lambda target: copy_once(closed, size, target, tls),
        }
        taken_s: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.rounds + 1):
            for way, copy in ways.items():
                took_s = _timed(copy, place / "target")
                if number:  # the first round warms up
                    taken_s[way].append(took_s)
    ratios = {}
    for way, times in taken_s.items():
        ratios[way] = statistics.median(plain / own for plain, own in zip(taken_s["plain TCP"], times, strict=True))
        print(f"{way:18} {size / statistics.median(times) / 1e9:6.2f} GB/s  {ratios[way]:5.2f} x plain TCP")
    return int(ratios["file server, open"] < NEEDED_SHARE)


def _timed(copy: Callable[[Path], None], target: Path) -> float:
    target.unlink(missing_ok=True)
    began = time.perf_counter()
    copy(target)
    return time.perf_counter() - began


def _streams(args: argparse.Namespace, place: Path, size: int) -> int:
    """Runs streams with and without a copy alternately, prints the times, and returns 0 if the slowdown is small."""
    flags = ["--engine", args.engine]
    flags += ["--engine-option", f"cost_ms={args.cost_ms:g}"] if args.engine == "dummy" else []
    question = Question("exo-mesh-demo", 32, args.tokens)
    with local_mesh(args.peers, flags, "bench-copy", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": question.model, "min_peers": args.peers}, PLACE_DEADLINE_S)
        urls = tuple(mesh.api_urls)

        def load() -> LoadResult:
            return asyncio.run(closed_loop(urls, question, args.streams, args.streams))

        load()
        worst = 0.0
        for secret in ("", new_secret()):
            before, during, copied = [], [], []
            for _ in range(args.rounds):
                before.append(_gaps(load()))
                with _copying(place, size, secret, is_busy=not args.unpaced) as num_bytes:
                    began = time.perf_counter()
                    during.append(_gaps(load()))
                    copied.append(num_bytes() / (time.perf_counter() - began))
            worst = max(worst, _show("TLS" if secret else "open", before, during, copied))
    return int(worst > MOST_ITL_RATIO)


@contextlib.contextmanager
def _copying(place: Path, size: int, secret: str, *, is_busy: bool) -> Iterator[Callable[[], int]]:
    """Copies for as long as the block lasts; yields a function that ends it and returns the bytes copied."""
    target, busy = place / "target", ["--busy"] if is_busy else []
    target.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        port = _number(stack.enter_context(_child("serve", str(place / "source"), *busy, secret=secret)))
        words = ["read", str(target), "--port", str(port), "--size", str(size), *busy]
        reader = stack.enter_context(_child(*words, secret=secret))
        while not (target.exists() and target.stat().st_size):
            time.sleep(0.01)
        yield lambda: _end(reader)


def _gaps(result: LoadResult) -> np.ndarray:
    if any(answer.error for answer in result.answers):
        raise EngineError(f"streams failed: {sorted({answer.error for answer in result.answers})}")
    return np.concatenate([np.diff(answer.came) for answer in result.answers])


def _show(name: str, before: list[np.ndarray], during: list[np.ndarray], copied: list[float]) -> float:
    """Prints, and returns the ratio of the times between tokens at the 99th percentile."""
    p99s = [[float(np.quantile(gaps, 0.99)) for gaps in rounds] for rounds in (before, during)]
    ratio = statistics.median(late / early for early, late in zip(*p99s, strict=True))
    quantiles = [np.quantile(np.concatenate(gaps), (0.5, 0.99)) * 1e3 for gaps in (before, during)]
    shown = [f"p50 {p50:.1f} ms, p99 {p99:.1f} ms" for p50, p99 in quantiles]
    print(
        f"{name:5} without a copy {shown[0]}; with one {shown[1]}; p99 {ratio:.2f} x (median of rounds); "
        f"{statistics.median(copied) / 1e6:.0f} MB/s copied"
    )
    return ratio
