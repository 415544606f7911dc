"""A ring of two llama.cpp stages beside whole-model llama.cpp: `python -m tools.bench llama-ring`.

The ring has two runner processes on one core each. llama.cpp computes the same random Llama with the same types and one
thread, on the first of these cores. With `--rpc DIR` it also computes with two servers of its own RPC on one core each,
from the libraries in DIR. All do the same job in turns: some streams at once, each with a short prompt and an answer of
some tokens, greedily. The figures are tokens per second over the whole job, the best of all turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exo_mesh.cli.bench.engines import count, parse_size
from exo_mesh.cli.bench.local_ring import NUM_IDS, LocalRunner, local_ring, plan_with_cuts, ring_request
from exo_mesh.errors import EngineError
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint
from tools.bench.llama_whole import Job, WholeChild, rpc_servers, whole_child

CONTEXT = 1024
DEADLINE_S = 600.0
KILL_AFTER_S = 0.3
"""After the beginning of an answer, an RPC server is killed."""


@dataclass(frozen=True)
class Load:
    """One line of the table: tokens per second of the ring, of llama.cpp on one core, and over its RPC (0: not
    measured)."""

    streams: int
    ring: float
    whole: float
    rpc: float


def add_parser(subparsers: Any) -> None:
    """Adds the benchmark."""
    parser = subparsers.add_parser("llama-ring", help="two llama.cpp stages beside llama.cpp", description=__doc__)
    parser.add_argument("--size", default="200M", metavar="N", help="weights of the random Llama")
    parser.add_argument("--quant", default="q8_0")
    parser.add_argument("--streams", default="1,4,8,16,32", metavar="A,B")
    parser.add_argument("--prompt", type=count(512), default=32, metavar="TOKENS")
    parser.add_argument("--tokens", type=count(CONTEXT // 2), default=128, help="of each answer")
    parser.add_argument("--turns", type=count(100), default=3, metavar="N")
    parser.add_argument("--cut", type=count(1000), metavar="LAYER", help="default: equal bytes on both stages")
    parser.add_argument("--rpc", type=Path, metavar="DIR", help="libllama.so with libggml-rpc.so")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the table."""
    from exo_mesh_llamacpp import provider

    if not (look := provider.availability()).available:
        raise EngineError(f"{look.reason} ({look.remedy})")
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
        directory = write_checkpoint(Path(scratch) / "model", model_of_size(parse_size(args.size)), repeat=True)
        loads = asyncio.run(_measure(args, directory, Path(scratch)))
    if args.json:
        print(json.dumps([asdict(load) for load in loads]))
    return 0


async def _measure(args: argparse.Namespace, directory: Path, scratch: Path) -> list[Load]:
    options = {"quant": args.quant, "threads": "1"}
    layers = model_of_size(parse_size(args.size)).layers
    cut = args.cut or balanced_cut(directory, options)
    if not 0 < cut < layers:
        raise EngineError(f"the model of {layers} layers cannot be cut at {cut}")
    cores = sorted(os.sched_getaffinity(0))[:2]
    most = max(map(int, args.streams.split(",")))
    numbers, found = itertools.count(), []
    with ExitStack() as stack:
        whole = stack.enter_context(whole_child(directory, options, cores[0]))
        rpc: WholeChild | None = None
        if args.rpc:
            servers = stack.enter_context(rpc_servers(args.rpc, cores, scratch))
            rpc = stack.enter_context(whole_child(directory, options, cores[0], args.rpc, servers))
        async with _ring(directory, layers, cut, options, most, cores) as runners:
            await _answers(runners, Job(2, args.prompt, 8), numbers)
            for streams in map(int, args.streams.split(",")):
                job = Job(streams, args.prompt, args.tokens)
                best = [0.0, 0.0, 0.0]
                for _ in range(args.turns):
                    seconds = [await _answers(runners, job, numbers), await whole.work(job)]
                    seconds += [await rpc.work(job)] if rpc else []
                    speeds = [job.num_tokens / taken for taken in seconds]
                    best[: len(speeds)] = map(max, best, speeds)
                found.append(Load(streams, *best))
                if not args.json:
                    print(_text(found[-1]), flush=True)
        if rpc and not args.json:
            print(await _without_a_server(rpc, args), flush=True)
    return found


async def _without_a_server(rpc: WholeChild, args: argparse.Namespace) -> str:
    """Kills an RPC server in the middle of an answer, and says what becomes of its client."""
    work = asyncio.create_task(rpc.work(Job(1, args.prompt, args.tokens)))
    await asyncio.sleep(KILL_AFTER_S)
    if work.done():
        return "the answer was complete before a server could be killed: ask for more --tokens"
    rpc.servers[-1].kill()
    try:
        seconds = await work
    except EngineError as exc:
        return f"after kill -9 of an RPC server: {exc}"
    return f"after kill -9 of an RPC server: the answer was complete after {seconds:.1f} s"


def balanced_cut(directory: Path, options: Mapping[str, str]) -> int:
    """The layer before which the second stage begins so that both read about equally many bytes for a decode step."""
    from exo_mesh_llamacpp import provider

    survey = provider.survey(directory, options)

    def larger(cut: int) -> int:
        return max(sum(survey.layer_bytes[:cut]), sum(survey.layer_bytes[cut:]) + survey.head_bytes)

    return min(survey.legal_cuts, key=larger)


def _text(load: Load) -> str:
    text = (
        f"{load.streams:2d} streams: ring {load.ring:7.1f} tokens/s, llama.cpp on one core {load.whole:7.1f}, "
        f"{load.ring / load.whole:.2f} x"
    )
    return text + (f"; over its RPC {load.rpc:7.1f}, {load.ring / load.rpc:.2f} x" if load.rpc else "")


@asynccontextmanager
async def _ring(
    directory: Path, layers: int, cut: int, options: dict[str, str], most: int, cores: Sequence[int]
) -> AsyncIterator[list[LocalRunner]]:
    plan = plan_with_cuts("llamacpp", (0, cut, layers), CONTEXT, (most + 1) * CONTEXT)
    async with local_ring(plan, directory, options, cores) as runners:
        yield runners


async def _answers(runners: Sequence[LocalRunner], job: Job, numbers: itertools.count[int]) -> float:
    """Seconds that the ring needs for a job."""
    draw = random.Random(next(numbers))
    async with runners[-1].driver() as ask:

        async def answer() -> None:
            prompt = [draw.randrange(3, NUM_IDS) for _ in range(job.prompt)]
            drawn = 0
            request = ring_request(f"bench-{next(numbers)}", prompt, job.tokens)
            async for events in ask(request, DEADLINE_S):
                drawn += len(events)
            if drawn < job.tokens:
                raise EngineError(f"the ring gave {drawn} tokens instead of {job.tokens}")

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(job.streams):
                group.create_task(answer())
        return time.perf_counter() - began
