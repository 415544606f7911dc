"""Measures what the prefix cache saves and what it costs: `python -m tools.bench prefix`.

A ring of runner processes on this machine computes each prompt once (cold) and again (warm), and a trace like that of
an agent: 20 turns, each with the whole conversation so far. Then a single stream without any reuse runs alternately on
two rings, with the cache and without it. Times are from the call to the first token, medians of the rounds. With
--disk it measures the disk tier instead, see prefix_disk.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_mesh.cli.bench.local_ring import NUM_IDS, LocalRunner, even_plan, local_ring, ring_request
from exo_mesh.errors import InputError
from exo_mesh.settings.values import MOST_CACHE_BYTES
from exo_mesh.weights.random_checkpoint import TinyModel, model_of_size, write_checkpoint
from tools.bench.prefix_disk import measure_disk

DEADLINE_S = 600.0
FIRST_TURN, NEW_TOKENS, ANSWER = 500, 100, 20
"""Tokens of the agent's first prompt, and of each later turn: new ones, and of each answer."""
ENGINES = ("dummy", "numpy", "torch", "mlx")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("prefix", help="what the prefix cache saves and costs", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="numpy")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], metavar="N")
    parser.add_argument("--prompt", type=int, default=2000, metavar="TOKENS")
    parser.add_argument("--parameters", type=int, default=0, metavar="N", help="of the model; 0: a tiny one")
    parser.add_argument(
        "--architecture", metavar="NAME", help="with --engine mlx: a tiny model of this one, such as qwen3_next"
    )
    parser.add_argument("--turns", type=int, default=20, help="of the agent")
    parser.add_argument("--tokens", type=int, default=128, help="of the single stream without reuse")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, metavar="DIR", help="measure the disk tier, with files below DIR, instead")
    parser.add_argument("--gaps", action="store_true", help="with --disk: only the gaps between tokens while it writes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if min(args.stages) < 1 or args.prompt < 128 or args.rounds < 1 or args.turns < 2 or args.tokens < 2:
        raise InputError("prefix needs prompts of at least 128 tokens, 2 turns, 2 tokens, and 1 stage and round")
    if args.architecture and (args.engine != "mlx" or args.parameters):
        raise InputError("--architecture needs --engine mlx, and no --parameters")
    with tempfile.TemporaryDirectory() as scratch:
        bench = PrefixBench(args, Path(scratch))
        if args.disk is not None:
            for stages in args.stages:
                asyncio.run(measure_disk(bench, stages, args))
            return 0
        for stages in args.stages:
            asyncio.run(bench.measure(stages))
        asyncio.run(bench.single_stream())
    return 0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: seconds to its first and to its last token, its tokens, the cached tokens of its prompt, and the Unix
    times of its tokens."""

    first_s: float
    all_s: float
    token_ids: list[int]
    cached: int
    times: list[float]


def _write_architecture(scratch: Path, architecture: str, context: int) -> int:
    """Writes a tiny random model of an architecture of mlx-lm; returns the number of its layers."""
    from tools.architectures import mlx_configs, mlx_models  # they need mlx

    config = mlx_configs.tiny_config(architecture) | {"vocab_size": 300, "max_position_embeddings": context}
    mlx_models.write_checkpoint(scratch, config)
    return mlx_configs.num_layers(config)


class PrefixBench:
    """The rings and requests of one run."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self._args, self._dir = args, scratch
        context = max(args.prompt, FIRST_TURN + args.turns * (NEW_TOKENS + ANSWER)) + 1024
        model = model_of_size(args.parameters) if args.parameters else TinyModel(layers=6, context=context)
        self._context, self._rng, self.numbers = context, random.Random(7), itertools.count()
        self._layers = model.layers
        if args.engine == "dummy":
            config = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": self._layers}
            (scratch / "config.json").write_text(json.dumps(config))
        elif args.architecture:
            self._layers = _write_architecture(scratch, args.architecture, context)
        else:
            write_checkpoint(scratch, model)

    @asynccontextmanager
    async def ring(self, stages: int, cache_bytes: int, disks: Path | None = None) -> AsyncIterator[list[LocalRunner]]:
        """A ring with room in its KV pool for several prompts. disks: where its stages write KV."""
        plan = even_plan(self._args.engine, self._layers, stages, self._context, 4 * self._context)
        options = {"cost_ms": "5"} if self._args.engine == "dummy" else {}
        async with local_ring(plan, self._dir, options, prefix_bytes=cache_bytes, disks=disks) as runners:
            yield runners

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that has not been asked before."""
        return [self._rng.randrange(3, NUM_IDS) for _ in range(tokens)]

    async def measure(self, stages: int) -> None:
        """Prints the figures of repeated prompts and of an agent, on a ring of so many stages."""
        async with self.ring(stages, MOST_CACHE_BYTES) as runners:
            await self.ask(runners, self.prompt(self._args.prompt), 2)  # paces are learnt
            cold, warm, again = [], [], []
            for _ in range(self._args.rounds):
                prompt = self.prompt(self._args.prompt)
                cold.append((await self.ask(runners, prompt, 2)).first_s)
                repeated = await self.ask(runners, prompt, 2)
                warm.append(repeated.first_s)
                again.append(len(prompt) - repeated.cached)
            first_s, second_s = statistics.median(cold), statistics.median(warm)
            print(
                f"{self._args.engine}, {stages} stages, {self._args.prompt} tokens: first token after "
                f"{1000 * first_s:.1f} ms cold, {1000 * second_s:.1f} ms warm ({100 * second_s / first_s:.1f} %); "
                f"{max(again)} tokens computed again",
                flush=True,
            )
            print(f"{self._args.engine}, {stages} stages, {await self._agent(runners)}", flush=True)

    async def _agent(self, runners: Sequence[LocalRunner]) -> str:
        talk, computed, new = self.prompt(FIRST_TURN), 0, FIRST_TURN
        for turn in range(self._args.turns):
            answered = await self.ask(runners, talk, ANSWER)
            computed += len(talk) - answered.cached + ANSWER - 1
            new += ANSWER + (NEW_TOKENS if turn else 0)
            talk += [*answered.token_ids, *self.prompt(NEW_TOKENS)]
        return f"{self._args.turns} turns: {computed} tokens computed for {new} new ones ({computed / new:.3f})"

    async def single_stream(self) -> None:
        """Prints the speed of a single stream without reuse, with the cache and without it, in turns."""
        stages = self._args.stages[0]
        async with self.ring(stages, MOST_CACHE_BYTES) as on, self.ring(stages, 0) as off:
            shares = []
            for index in range(self._args.rounds + 1):
                prompt = self.prompt(64)
                order = (on, off) if index % 2 else (off, on)
                made = {id(ring): await self.ask(ring, prompt, self._args.tokens) for ring in order}
                if index:  # the first round warms up
                    shares.append(made[id(off)].all_s / made[id(on)].all_s)
        print(
            f"{self._args.engine}, {stages} stages, a single stream of {self._args.tokens} tokens without reuse: "
            f"{statistics.median(shares):.3f} of its speed without the cache (min {min(shares):.3f})"
        )

    async def ask(self, runners: Sequence[LocalRunner], prompt: Sequence[int], tokens: int) -> Answered:
        """Sends a prompt, and waits for so many tokens."""
        request = ring_request(f"bench-{next(self.numbers)}", prompt, tokens)
        async with runners[-1].driver() as ask:
            events, times, began, began_at = [], [], time.perf_counter(), time.time()
            async for some in ask(request, DEADLINE_S):
                events += some
                times += [time.perf_counter() - began] * len(some)
            all_s = time.perf_counter() - began
        token_ids = [event.token_id for event in events]
        return Answered(times[0], all_s, token_ids, events[0].cached, [began_at + at for at in times])
