"""Tokens per second through one entry peer: `python -m tools.bench entry --against OTHER_CHECKOUT`.

One node with the dummy engine, one stage, and a client that only counts events. With --against the same is done with
the code of another checkout in turns, and the medians are compared. With --healthz the node is also asked for /healthz
all the time while the streams start and run: how long do others wait for an answer then?
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import psutil

from tools.bench.sides import add_against, cpu_s, node_of, sides

MODEL = "exo-mesh-demo"
PLACE_S, RUN_S = 60.0, 120.0
HEALTH_EVERY_S = 0.005
CHILD_START_S = 1.0
"""Time for the process that asks for /healthz to import what it needs."""


@dataclass(frozen=True)
class Figures:
    """The figures of one run: tokens per second of all streams, and CPU microseconds per token in node and runner."""

    tokens_per_s: float
    node_us: float
    runner_us: float
    healthz_p99_ms: float = 0.0


async def stream(host: str, port: int, tokens: int) -> int:
    """Requests `tokens` tokens as a stream; returns the number of events."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}
    data = json.dumps({**body, "temperature": 0, "max_tokens": tokens}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    events, rest = 0, b""
    while chunk := await reader.read(1 << 16):
        events += (rest + chunk).count(b"data: ")
        rest = chunk[-5:]
    writer.close()
    return events


async def ask_health(host: str, port: int, until: Synchronized[int]) -> list[float]:
    """Asks for /healthz every HEALTH_EVERY_S until `until` is set; returns the milliseconds that each answer took."""
    taken_ms: list[float] = []
    while not until.value:
        begin = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        taken_ms.append((time.perf_counter() - begin) * 1e3)
        await asyncio.sleep(HEALTH_EVERY_S)
    return taken_ms


def ask_health_apart(host: str, port: int, until: Synchronized[int], result: Connection) -> None:
    """In a process of its own, which the client of a thousand streams does not hold up: asks until `until` is set,
    then sends the 99th percentile."""
    result.send(statistics.quantiles(asyncio.run(ask_health(host, port, until)), n=100)[98])


@contextlib.contextmanager
def health_watch(host: str, port: int, found: list[float]) -> Iterator[None]:
    """While open, another process asks for /healthz; at the end `found` gets the 99th percentile in milliseconds."""
    context = multiprocessing.get_context("spawn")
    until, (ours, theirs) = context.Value("i", 0), context.Pipe()
    child = context.Process(target=ask_health_apart, args=(host, port, until, theirs), daemon=True)
    child.start()
    time.sleep(CHILD_START_S)
    try:
        yield
        until.value = 1
        if ours.poll(RUN_S):
            found.append(ours.recv())
    finally:
        child.kill()
        child.join()


def measure(url: str, node: psutil.Process, streams: int, tokens: int, *, with_health: bool = False) -> Figures:
    """Runs the streams. with_health: ask for /healthz meanwhile."""
    host, port = url.removeprefix("http://").split(":")
    found: list[float] = []
    with health_watch(host, int(port), found) if with_health else contextlib.nullcontext():
        figures = asyncio.run(run_streams(host, int(port), node, streams, tokens))
    return replace(figures, healthz_p99_ms=found[0] if found else 0.0)


async def run_streams(host: str, port: int, node: psutil.Process, streams: int, tokens: int) -> Figures:
    runners = node.children(recursive=True)
    before = cpu_s(node), sum(map(cpu_s, runners))
    begin = time.perf_counter()
    async with asyncio.timeout(RUN_S):
        events = await asyncio.gather(*(stream(host, port, tokens) for _ in range(streams)))
    took_s = time.perf_counter() - begin
    num_tokens = streams * tokens
    assert min(events) > 2, "a stream ended at once: the node refused it"
    after = cpu_s(node), sum(map(cpu_s, runners))
    used = [1e6 * (late - early) / num_tokens for early, late in zip(before, after, strict=True)]
    return Figures(num_tokens / took_s, *used)


def once(checkout: Path, streams: int, tokens: int, *, with_health: bool) -> Figures:
    """Starts a node, warms it up, and measures. checkout: whose code runs."""
    with node_of(checkout, ["--engine", "dummy", "--max-queued", "4096"]) as child:
        child.api.post("/instance", {"model": MODEL}, PLACE_S)
        node = psutil.Process(child.pid)
        measure(child.url, node, streams, 20)
        return measure(child.url, node, streams, tokens, with_health=with_health)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("entry", help="tokens per second through one entry peer", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=900, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    add_against(parser)
    parser.add_argument("--healthz", action="store_true", help="ask for /healthz meanwhile")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    checkouts = sides(args.against)
    runs: dict[str, list[Figures]] = {side: [] for side in checkouts}
    for _ in range(args.rounds):
        for side, checkout in checkouts.items():
            figures = once(checkout, args.streams, args.tokens, with_health=args.healthz)
            runs[side].append(figures)
            cpu = f"node {figures.node_us:.0f} us, runner {figures.runner_us:.0f} us"
            health = f", /healthz p99 {figures.healthz_p99_ms:.1f} ms" if args.healthz else ""
            print(f"{side:8} {figures.tokens_per_s:8.0f} tokens/s, CPU per token: {cpu}{health}", flush=True)
    medians = {side: statistics.median(run.tokens_per_s for run in given) for side, given in runs.items()}
    if args.against:
        this, against = medians["this"], medians["against"]
        print(f"medians: {this:.0f} and {against:.0f} tokens/s, {this / against:.2f} x")
    return 0
