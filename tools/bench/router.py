"""Time to first token of requests that the mesh spreads over instances of different speed, beside an oracle.

`python -m tools.bench router`

Six nodes with the dummy engine hold two rings of two stages and two instances on one node each, all of different speed.
Requests come at random times (a Poisson process) with answers of random length, whether earlier ones are done or not.
One system is the mesh itself, which has to learn the speeds. The others are oracles in the client: they measure each
instance alone beforehand, know the progress of every request, and name the instance by the name of its model. One
minimises the same cost as the mesh, the other one the time to first token alone. Each system has instances of its own
on the same nodes (the engine only waits), and all get the same requests at the same times, so that other work of the
machine disturbs all of them alike. The mesh begins with nothing measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

import exo_mesh
from exo_mesh.cli.bench.load import Question
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.tables import print_json
from exo_mesh.domain.routing.choice import Expected, Job, Option, expected_times
from exo_mesh.domain.routing.speed import Speed
from tests.support.peers import Peer, mesh

SHIPPED = "exo-mesh-demo"
PLACE_S, REQUEST_S = 120.0, 300.0
PROMPT_TOKENS = 64
STEPS_MS = (12.0, 24.0, 20.0, 80.0)
"""Milliseconds of a step of each stage: of the two rings, whose laps are twice as long, and of the two lone nodes."""

ORACLES: dict[str, Callable[[Expected], float]] = {
    "oracle": lambda expected: expected.cost,
    "first-token-oracle": lambda expected: expected.first_s,
}
"""What each oracle minimises."""

SAMPLES = 30
"""How often each measured time is put into the oracle's lines, so that these hold it exactly."""

BAR = 1.2


@dataclass(frozen=True)
class Call:
    """One request of the load: when it comes, in seconds since the start, and the length of its answer."""

    at: float
    tokens: int


@dataclass
class Stream:
    """One request under way. came: the times of its pieces of text, in seconds since it was sent."""

    tokens: int
    came: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def job(self) -> Job:
        return Job(0 if self.came else PROMPT_TOKENS, self.tokens - len(self.came))


@dataclass
class KnownInstance:
    """An instance as an oracle knows it. model: the name that reaches it."""

    model: str
    speed: Speed
    slots: int
    streams: list[Stream] = field(default_factory=list)

    @property
    def option(self) -> Option:
        return Option(self.speed, [stream.job for stream in self.streams], 0, self.slots)


class Client:
    """Sends requests to one node, and measures their answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._number = 0

    async def __aenter__(self) -> Client:
        timeout, connector = aiohttp.ClientTimeout(total=REQUEST_S), aiohttp.TCPConnector(limit=0)
        headers = ApiClient(self._url).credentials()
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def ask(self, model: str, stream: Stream) -> Stream:
        """Follow one request to its end."""
        self._number += 1
        body = Question(model, PROMPT_TOKENS, stream.tokens).body(self._number)
        begin = time.perf_counter()
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    stream.error = f"HTTP {reply.status}"
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        stream.error = str(event["error"]) if event.get("error") else stream.error
                        if any(choice.get("text") for choice in event.get("choices", ())):
                            stream.came.append(time.perf_counter() - begin)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            stream.error = type(exc).__name__
        return stream


async def measured(client: Client, model: str, slots: int) -> KnownInstance:
    """Measure an instance alone, with one stream and with as many as it runs at once."""
    speed = Speed()
    await client.ask(model, Stream(16))
    for streams in (1, slots):
        answers = await asyncio.gather(*(client.ask(model, Stream(60)) for _ in range(streams)))
        step_s = statistics.median(gap for answer in answers for gap in np.diff(answer.came).tolist())
        for _ in range(SAMPLES):
            speed.took_step(streams, step_s, 0.0)
    firsts = [(await client.ask(model, Stream(1))).came[0] for _ in range(5)]
    for _ in range(SAMPLES):
        speed.took_first(PROMPT_TOKENS, statistics.median(firsts), 0.0)
    return KnownInstance(model, speed, slots)


async def play(client: Client, calls: Sequence[Call], send: Callable[[Call], Any]) -> list[Stream]:
    """Send each request at its time; returns the streams when all have ended."""
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for call in calls:
            await asyncio.sleep(max(0.0, begin + call.at - time.perf_counter()))
            tasks.append(group.create_task(send(call)))
    return [task.result() for task in tasks]


def router(client: Client) -> Callable[[Call], Any]:
    """The mesh chooses."""
    return lambda call: client.ask(SHIPPED, Stream(call.tokens))


def oracle(client: Client, known: Sequence[KnownInstance], cost: Callable[[Expected], float]) -> Callable[[Call], Any]:
    """The client chooses the instance with the least cost."""

    async def send(call: Call) -> Stream:
        stream = Stream(call.tokens)
        costs = [cost(expected) for expected in expected_times([one.option for one in known], stream.job)]
        chosen = known[costs.index(min(costs))]
        chosen.streams.append(stream)
        try:
            return await client.ask(chosen.model, stream)
        finally:
            chosen.streams.remove(stream)

    return send


def calls(seed: int, requests: int, per_s: float, tokens: int) -> list[Call]:
    """A Poisson process; lengths are spread evenly from a quarter to seven quarters of `tokens`."""
    random_, at, found = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += random_.expovariate(per_s)
        found.append(Call(at, max(1, int(tokens * random_.uniform(0.25, 1.75)))))
    return found


def capacity_per_s(known: Sequence[KnownInstance], tokens: int) -> float:
    """Requests per second that all instances together can answer."""
    times = [
        one.slots / (PROMPT_TOKENS * one.speed.prompt_token_s + tokens * one.speed.step.at(one.slots)) for one in known
    ]
    return sum(times)


def quantiles(streams: Sequence[Stream]) -> dict[str, float]:
    """Figures of one system, over all rounds."""
    good = [stream for stream in streams if stream.came and not stream.error]
    ttft = [stream.came[0] for stream in good]
    p50, p95, p99 = np.quantile(ttft, (0.5, 0.95, 0.99))
    return {
        "requests": len(streams),
        "failed": len(streams) - len(good),
        "ttft_p50_s": round(float(p50), 4),
        "ttft_p95_s": round(float(p95), 4),
        "ttft_p99_s": round(float(p99), 4),
        "mean_s": round(statistics.fmean(stream.came[-1] for stream in good), 4),
    }


@contextmanager
def six_nodes(root: Path, slots: int) -> Iterator[list[Peer]]:
    """Nodes 0 and 1, and 2 and 3, for the rings; 4 and 5 alone. Each has the shipped model, and copies of it."""
    models = root / "models"
    shipped = Path(exo_mesh.__file__).parent / "weights" / "shipped" / SHIPPED
    for index in range(len(STEPS_MS)):
        for oracle_name in ORACLES:
            shutil.copytree(shipped, models / f"{oracle_name}-{index}")
    of_node = (STEPS_MS[0], STEPS_MS[0], STEPS_MS[1], STEPS_MS[1], STEPS_MS[2], STEPS_MS[3])
    shared = ["--models-dir", str(models), "--max-batch-size", str(slots), "--max-queued", "1000"]
    shared += ["--auto-replicas", "off", "--trace-sample", "0", "--engine-option", "row_cost_ms=1"]
    flags = [[*shared, "--engine-option", f"cost_ms={step_ms:g}"] for step_ms in of_node]
    with mesh(root, flags, engine="dummy") as peers:
        groups = ([0, 1], [2, 3], [4], [5])
        for index, group in enumerate(groups):
            others = [peer.id for number, peer in enumerate(peers) if number not in group]
            for model in (SHIPPED, *(f"{oracle_name}-{index}" for oracle_name in ORACLES)):
                wish = {"model": model, "min_peers": len(group), "exclude_peers": others}
                peers[group[0]].api.post("/instance", wish, PLACE_S)
        yield peers


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("router", help="time to first token beside an oracle", description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.7, help="part of what all instances together can answer")
    parser.add_argument("--tokens", type=int, default=40, help="mean length of an answer")
    parser.add_argument("--slots", type=int, default=2, help="requests that an instance runs at once")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Let all systems answer the same requests."""
    async with Client(url) as client:
        known = [await measured(client, f"oracle-{index}", args.slots) for index in range(len(STEPS_MS))]
        per_s = args.load * capacity_per_s(known, args.tokens)
        systems = {"mesh": router(client)}
        for name, cost in ORACLES.items():
            instances = [KnownInstance(f"{name}-{index}", one.speed, one.slots) for index, one in enumerate(known)]
            systems[name] = oracle(client, instances, cost)
        load = calls(args.seed, args.requests, per_s, args.tokens)
        streams = await asyncio.gather(*(play(client, load, send) for send in systems.values()))
    return {
        "steps_ms": [round(1000 * one.speed.step.at(1), 2) for one in known],
        "per_s": round(per_s, 2),
        "load": args.load,
        **{name: quantiles(found) for name, found in zip(systems, streams, strict=True)},
    }


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as root, six_nodes(Path(root), args.slots) as peers:
        result = asyncio.run(measure(peers[0].url, args))
    p95 = result["mesh"]["ttft_p95_s"]
    result["ratios"] = {name: round(p95 / result[name]["ttft_p95_s"], 3) for name in ORACLES}
    print_json(result) if args.json else show(result)
    return int(max(result["ratios"].values()) > BAR or result["mesh"]["failed"] > 0)


def show(result: dict[str, Any]) -> None:
    steps = ", ".join(f"{step_ms:g}" for step_ms in result["steps_ms"])
    print(f"steps of the instances: {steps} ms; {result['per_s']} requests/s, {result['load']:.0%} of what they can do")
    for name in ("mesh", *ORACLES):
        one = result[name]
        print(
            f"{name:20} {one['requests']} requests, {one['failed']} failed, time to first token p50 "
            f"{one['ttft_p50_s']:.3f} s, p95 {one['ttft_p95_s']:.3f} s, p99 {one['ttft_p99_s']:.3f} s; "
            f"whole answer {one['mean_s']:.3f} s"
        )
    ratios = ", ".join(f"{ratio:.2f} x of the {name}" for name, ratio in result["ratios"].items())
    print(f"p95 of the mesh: {ratios}; the bar is {BAR:g}")
