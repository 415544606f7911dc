"""Measure how requests share a ring: what batching costs one stream, and what a request notices of others.

Real frames pass over real runner processes on this machine, without nodes. Four ratios, each the median of the rounds:
one stream on a ring that may batch, against a ring that runs one request at a time; the time to the first token of two
requests that come together, against one alone; eight equal requests together, against one; and a running stream while
a long prompt enters, against the same stream before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli.bench.local_ring import NUM_IDS, even_plan, local_ring, ring_request
from exo_mesh.cli.bench.result import BenchResult
from exo_mesh.domain.footprint import POOL_TOKENS
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Plan
from exo_mesh.settings.config import ConfigError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.store import ModelStore
from exo_mesh.wire.driver_connection import Ask

MODEL = "exo-mesh-demo"
CALL_DEADLINE_S = 300.0
NUM_EQUAL = 8
SETTLED = 32
"""Tokens of the running stream before the long prompt enters."""
BARS = {"one_stream": (">=", 0.98), "two_first_tokens": ("<=", 2.2), "stream_beside_prompt": (">=", 0.8)}
"""Aims of the ratios; the aim for eight requests depends on the number of stages."""
SLACK = 1.25
"""Eight requests may take this times 8 / stages as long as one."""


class FairnessLoad(msgspec.Struct, frozen=True):
    """prompt, tokens: of each request. long: tokens of the long prompt."""

    prompt: int
    tokens: int
    long: int


class Call(msgspec.Struct):
    """Times of one request in seconds of time.perf_counter."""

    sent: float = 0.0
    came: list[float] = msgspec.field(default_factory=list)
    settled: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        return self.came[0] - self.sent

    @property
    def gap_s(self) -> float:
        """The mean time between two tokens."""
        return (self.came[-1] - self.came[0]) / (len(self.came) - 1)

    def rate_between(self, start: float, end: float) -> float:
        """Tokens per second in a span of time: laps that overlap its ends count in part. Tokens of one message have no
        time between them."""
        gaps = [(a, b) for a, b in pairwise(self.came) if b > start and a < end]
        return sum(1.0 if a == b else (min(b, end) - max(a, start)) / (b - a) for a, b in gaps) / (end - start)


class RingClient:
    """Sends requests to the driver of a ring."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._sent = 0

    async def ask(self, prompt: int, tokens: int, call: Call | None = None) -> Call:
        """Runs one request to its end; every prompt is different."""
        call = call or Call()
        self._sent += 1
        prompt_ids = [(index * self._sent + self._sent) % NUM_IDS for index in range(prompt)]
        request = ring_request(f"bench-{self._sent}", prompt_ids, tokens)
        call.sent = time.perf_counter()
        async for events in self._ask(request, CALL_DEADLINE_S):
            call.came += [time.perf_counter()] * len(events)
            if len(call.came) >= SETTLED:
                call.settled.set()
        return call

    async def together(self, count: int, prompt: int, tokens: int) -> list[Call]:
        """Runs `count` requests at once."""
        return await asyncio.gather(*(self.ask(prompt, tokens) for _ in range(count)))


def add_parser(subparsers: Any) -> None:
    """Adds the verb `exo-mesh bench fairness`."""
    parser = subparsers.add_parser("fairness", help="how requests share a ring", description=__doc__)
    parser.add_argument("--peers", type=int, default=4, metavar="N", help="stages of the ring (default 4)")
    parser.add_argument("--engine", default="dummy", metavar="NAME", help="engine of the stages (default dummy)")
    parser.add_argument("--engine-option", action="append", metavar="K=V", help="an option of the engine")
    parser.add_argument("--model", default=MODEL, metavar="MODEL", help=f"model or directory (default {MODEL})")
    parser.add_argument("--prompt", type=int, default=32, metavar="N", help="tokens of a prompt (default 32)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of an answer (default 64)")
    parser.add_argument("--long", type=int, default=1024, metavar="N", help="tokens of the long prompt (default 1024)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each measurement (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> BenchResult:
    """Measures the ring that the flags describe."""
    options = dict(text.partition("=")[::2] for text in args.engine_option or ["cost_ms=10"] * (args.engine == "dummy"))
    for name in ("peers", "prompt", "tokens", "long", "rounds"):
        if getattr(args, name) < (SETTLED + 1 if name == "tokens" else 1):
            raise ConfigError(f"--{name} {getattr(args, name)}: must be larger")
    load = FairnessLoad(args.prompt, args.tokens, args.long)
    figures = asyncio.run(measure(args.peers, args.engine, options, _directory(args.model), load, args.rounds))
    result: dict[str, Any] = {"bench": "fairness", "peers": args.peers, "engine": args.engine, "options": options}
    result |= {"model": args.model, "prompt": load.prompt, "tokens": load.tokens, "long": load.long}
    result |= {"rounds": args.rounds, "ratios": figures}
    return BenchResult(result, _text(result))


async def measure(
    peers: int, engine: str, options: dict[str, str], directory: Path, load: FairnessLoad, rounds: int
) -> dict[str, dict[str, Any]]:
    """The four ratios by name: median, low and high of the rounds, and the aim."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    card = read_card(directory, directory.name)
    found: dict[str, list[float]] = {name: [] for name in (*BARS, "eight_requests")}
    async with AsyncExitStack() as stack:
        clients = []
        for sequences in (0, 1):
            plan = _plan(peers, engine, card, load, sequences)
            runners = await stack.enter_async_context(local_ring(plan, directory, options, cpus))
            clients.append(RingClient(await stack.enter_async_context(runners[-1].driver())))
        for client in clients:
            await client.together(NUM_EQUAL, load.prompt, load.tokens)
            await client.ask(load.long, 2)
        for _ in range(rounds):
            await _round(clients[0], clients[1], load, found)
    bars = BARS | {"eight_requests": ("<=", round(SLACK * max(1.0, NUM_EQUAL / peers), 3))}
    return {name: _summary(values, *bars[name]) for name, values in found.items()}


async def _round(ring: RingClient, one_by_one: RingClient, load: FairnessLoad, found: dict[str, list[float]]) -> None:
    """Measures each ratio once; the two sides of a ratio run one after the other."""
    clients = ring, one_by_one, one_by_one, ring
    alone, first, second, again = [await client.ask(load.prompt, load.tokens) for client in clients]
    # the better of two: a pause of the machine is longer than what batching may cost
    found["one_stream"].append(min(first.gap_s, second.gap_s) / min(alone.gap_s, again.gap_s))
    two = await ring.together(2, load.prompt, load.tokens)
    found["two_first_tokens"].append(statistics.mean(call.ttft_s for call in two) / alone.ttft_s)
    eight = await ring.together(NUM_EQUAL, load.prompt, load.tokens)
    whole_s = max(call.came[-1] for call in eight) - min(call.sent for call in eight)
    found["eight_requests"].append(whole_s / (alone.came[-1] - alone.sent))
    found["stream_beside_prompt"].append(await _beside_prompt(ring, load))


async def _beside_prompt(ring: RingClient, load: FairnessLoad) -> float:
    """The rate of a stream while a long prompt enters, against its rate before."""
    stream = Call()
    task = asyncio.ensure_future(ring.ask(load.prompt, load.long + 4 * load.tokens, stream))
    try:
        waits = asyncio.ensure_future(stream.settled.wait())
        await asyncio.wait((task, waits), return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        late = await ring.ask(load.long, 1)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    before = (SETTLED - 1) / (stream.came[SETTLED - 1] - stream.came[0])
    return stream.rate_between(late.sent, min(late.came[0], stream.came[-1])) / before


def _directory(model: str) -> Path:
    directory = Path(model).expanduser()
    return directory.resolve() if directory.is_dir() else ModelStore(()).find(model)


def _plan(peers: int, engine: str, card: ModelCard, load: FairnessLoad, sequences: int) -> Plan:
    """A ring of equal stages. sequences: most requests at once; 0 means the usual number."""
    limit = 2 * load.long + 4 * load.tokens + load.prompt
    plan = even_plan(engine, card.num_layers, peers, limit, max(POOL_TOKENS, NUM_EQUAL * limit))
    return replace(plan, pool_sequences=sequences)


def _summary(values: Sequence[float], sign: str, bar: float) -> dict[str, Any]:
    median = statistics.median(values)
    met = median >= bar if sign == ">=" else median <= bar
    return {
        "ratio": round(median, 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
        "aim": f"{sign} {bar:g}",
        "met": met,
    }


_NAMES = {
    "one_stream": "one stream where batching is allowed, against a ring of one request at a time",
    "two_first_tokens": "time to the first token of two requests, against one",
    "eight_requests": "eight equal requests at once, against one",
    "stream_beside_prompt": "a running stream while a long prompt enters, against before",
}


def _text(result: dict[str, Any]) -> str:
    options = ",".join(f"{key}={value}" for key, value in result["options"].items())
    head = f"{result['peers']} stages of {result['engine']} {options}, {result['prompt']} x {result['tokens']}, "
    head += f"a long prompt of {result['long']}, medians of {result['rounds']} rounds"
    rows = [
        [_NAMES[name], one["ratio"], f"{one['low']} to {one['high']}", one["aim"], "met" if one["met"] else "missed"]
        for name, one in result["ratios"].items()
    ]
    return "\n".join([head, columns(["", "ratio", "rounds", "aim", ""], rows)])
