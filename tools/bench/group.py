"""`python -m tools.bench group` checks and measures a tensor group whose ranks all run on this machine, over TCP.

The leader of every new group measures the same before traffic. On one machine the figures show whether this model, mlx
and mlx-lm compute the right result as a group, and whether the group is stable under load. The speed of a link can be
measured only between two machines.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.cli.bench.engines import count, parse_size
from exo_mesh.cli.bench.local_ring import LocalRunner, local_ring
from exo_mesh.cli.tables import print_json
from exo_mesh.domain.group_placement import GroupTimes, group_verdict
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import GroupCheck, GroupFigures, TensorGroup
from exo_mesh.errors import EngineError, InputError, MeshError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.model_files import read_json
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint
from exo_mesh.weights.store import model_dir_of
from exo_mesh.wire.control_driver import DriverChannels, Silences, complete

ENGINE = "mlx"
CONTEXT = 2048
CHUNK = 512
HOP_S = 300e-6
"""Seconds of a hop between two machines as stages, over a good LAN (docs/measurements/hop.md)."""

SILENCE_S = 120.0
AT_ONCE = 4
_ITEM_BYTES = {"float32": 4}


@dataclass(frozen=True, slots=True)
class Stress:
    """The stress test: completed requests, those with the same tokens as one process, and the seconds of both."""

    requests: int
    ended: int
    same_tokens: int
    group_s: float
    alone_s: float


def add_parser(subparsers: Any) -> None:
    """Adds `group` to the verbs of `python -m tools.bench`."""
    parser = subparsers.add_parser("group", help="a tensor group on this machine: correctness, costs, stress")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="NAME", help="a model of this machine, or a directory")
    what.add_argument("--random", metavar="SIZE", default="8M", help="a random float32 Llama of so many weights (8M)")
    parser.add_argument("--ranks", type=count(8), default=2, metavar="N", help="ranks, 2 to 8 (2)")
    parser.add_argument("--requests", type=count(1000), default=16, metavar="N", help="requests of the stress (16)")
    parser.add_argument("--tokens", type=count(512), default=16, metavar="N", help="tokens that each draws (16)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and returns 0 if the group computed the same as one process."""
    if args.ranks < 2:
        raise InputError("a tensor group has at least two ranks", param="ranks")
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
        if args.model:
            model_dir = model_dir_of(args.model)
        else:
            model = model_of_size(parse_size(args.random), "float32")
            model = replace(model, kv_heads=model.heads)  # few KV heads may not divide by the ranks
            model_dir = write_checkpoint(Path(scratch) / "random", model)
        result = asyncio.run(measure(model_dir, args.ranks, args.requests, args.tokens))
    print_json(result) if args.json else print(_text(result))
    return 0 if result["correct"] else 1


async def measure(model_dir: Path, ranks: int, requests: int, tokens: int) -> dict[str, Any]:
    """Measures all figures. Raises MeshErrors; a CanaryError means that the group computes a wrong result."""
    card = read_card(model_dir, model_dir.name)
    lengths = [8 + number % 25 for number in range(requests)]
    prompts = [[(31 * length + 7 * place) % min(card.vocab_size, 250) for place in range(length)] for length in lengths]
    alone, alone_s, _ = await _answers(_plan(card.num_layers, 1), model_dir, prompts, tokens)
    together, group_s, figures = await _answers(_plan(card.num_layers, ranks), model_dir, prompts, tokens)
    if figures is None:
        raise EngineError("the leader of the group has not reported its check")
    check = figures.check
    same = sum(mine == theirs for mine, theirs in zip(together, alone, strict=True))
    stress = Stress(requests, sum(len(answer) == tokens for answer in together), same, group_s, alone_s)
    exact = card.dtype == "float32" and not read_json(model_dir / "config.json").get("quantization")
    return {
        "model": model_dir.name,
        "ranks": ranks,
        "backend": "ring",
        "correct": stress.ended == requests and (same == requests or not exact),
        "canary": {"worst": check.worst},
        "all_reduce": {"few_bytes_us": check.all_reduce_s * 1e6, "bytes_per_s": check.reduce_bytes_per_s},
        "layer": {
            "alone_token_us": check.alone_layer_s * 1e6,
            "alone_chunk_ms": check.alone_chunk_s * 1e3,
            "group_chunk_ms": check.chunk_s * 1e3 / card.num_layers,
        },
        "frame_deadline_s": figures.deadline_s,
        "stress": asdict(stress),
        "verdict": _verdict(check, ranks, card.num_layers, card.hidden_size * _ITEM_BYTES.get(card.dtype, 2)),
    }


def _plan(num_layers: int, ranks: int) -> Plan:
    peers = tuple(f"bench{rank}" for rank in range(ranks))
    group = TensorGroup("ring", peers) if ranks > 1 else None
    stage = StagePlan(peers[0], ENGINE, Shard("bench", 0, num_layers, num_layers), 0, group)
    return Plan("bench", Ballot(1, "bench"), "bench", "", (stage,), CONTEXT, PlanInputs((), "memory", 1), 4 * CONTEXT)


async def _answers(
    plan: Plan, model_dir: Path, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[list[list[int]], float, GroupFigures | None]:
    """Returns (greedy tokens of each prompt, AT_ONCE at a time; seconds for all; the leader's figures)."""
    channels, places = DriverChannels(), asyncio.Semaphore(AT_ONCE)

    async def one(runner: LocalRunner, number: int, prompt: Sequence[int]) -> list[int]:
        greedy = SamplingParams(temperature=0.0)
        request = GenerateRequest(f"bench{number}", tuple(prompt), tokens, greedy, ignore_eos=True)
        endpoint = f"127.0.0.1:{runner.port}"
        async with places:
            call = channels.open(endpoint, plan, request, Silences(SILENCE_S, SILENCE_S, SILENCE_S))
            try:
                return await complete(call, SILENCE_S)
            except (MeshError, TimeoutError):
                return []

    try:
        async with local_ring(plan, model_dir, {}) as (runner,):
            start = time.perf_counter()
            answers = await asyncio.gather(*(one(runner, number, prompt) for number, prompt in enumerate(prompts)))
            ready = runner.ready
            figures = ready.loaded.group if ready is not None else None
            return answers, time.perf_counter() - start, figures
    finally:
        await channels.close()


def _verdict(check: GroupCheck, ranks: int, num_layers: int, token_bytes: int) -> dict[str, Any]:
    """Judges as if the ranks were separate machines with this link between them."""
    try:
        times = GroupTimes(
            ranks=ranks,
            num_layers=num_layers,
            all_reduce_s=check.all_reduce_s,
            reduce_bytes_per_s=check.reduce_bytes_per_s,
            layer_s=check.alone_layer_s,
            chunk_layer_s=check.alone_chunk_s,
            chunk_tokens=CHUNK,
            token_bytes=token_bytes,
            hop_s=HOP_S,
        )
    except ValueError:
        return {"reason": "no layer of this model can be taken alone, so there is nothing to compare"}
    return msgspec.structs.asdict(group_verdict(times))


def _text(result: dict[str, Any]) -> str:
    stress, layer, reduce = result["stress"], result["layer"], result["all_reduce"]
    return "\n".join(
        [
            f"{result['model']}: {result['ranks']} ranks on this machine over {result['backend']}: "
            + ("right" if result["correct"] else "WRONG"),
            f"  canary      worst token {result['canary']['worst']:.2g} of its length from one machine's",
            f"  all-reduce  {reduce['few_bytes_us']:.0f} us for a few bytes, {reduce['bytes_per_s'] / 1e9:.2f} GB/s",
            f"  one layer   {layer['alone_token_us']:.0f} us a token and {layer['alone_chunk_ms']:.1f} ms a chunk "
            f"alone; {layer['group_chunk_ms']:.1f} ms a chunk as a group",
            f"  stress      {stress['ended']} of {stress['requests']} requests ended, {stress['same_tokens']} with the "
            f"tokens of one process; {stress['group_s']:.1f} s, and {stress['alone_s']:.1f} s alone",
            f"  {result['verdict']['reason']}",
        ]
    )
