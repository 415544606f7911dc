"""Measures sequences that hold their beginning together in memory: `python -m tools.bench shared`.

One stage in this process computes a prompt once, and streams begin as its copies. Their memory is compared with that of
one copy. Then frames with all streams are computed alternately for these copies and for sequences that have the same
positions in memory of their own. Last, prompts are looked up in an index of prefixes of 100,000 blocks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, SequenceCopier, SequenceSaver, StageEngine, StageInput
from exo_mesh.engine.registry import load_registry
from exo_mesh.errors import InputError
from exo_mesh.rings.runner.prefix.index import BLOCK_TOKENS, PrefixIndex, content_of
from exo_mesh.weights.random_checkpoint import TinyModel, model_of_size, write_checkpoint

ROOM = 512
"""Positions that a stream may have behind the prompt."""
BLOCKS, LOOKUP_TOKENS = 100_000, 2000


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "shared", help="memory and speed of streams over one prompt, and the time of a lookup", description=__doc__
    )
    parser.add_argument("--engine", choices=("numpy", "torch", "mlx", "llamacpp"), default="numpy")
    parser.add_argument("--parameters", type=int, default=0, metavar="N", help="of the model; 0: a tiny one")
    parser.add_argument("--prompt", type=int, default=1000, metavar="TOKENS")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8, help="frames of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.prompt < 2 or args.streams < 1 or not 0 < args.steps * (args.rounds + 1) < ROOM:
        raise InputError(f"shared needs a prompt, streams, and fewer than {ROOM} frames")
    with tempfile.TemporaryDirectory() as scratch:
        stage = _load(args, Path(scratch))
        print(json.dumps(measure(stage, args.prompt, args.streams, args.steps, args.rounds)), flush=True)
        stage.close()
    print(json.dumps({"blocks": BLOCKS, "lookup_us": round(1e6 * lookup_s(), 1)}))
    return 0


def _load(args: argparse.Namespace, directory: Path) -> StageEngine:
    context = args.prompt + 2 * ROOM
    model = replace(model_of_size(args.parameters) if args.parameters else TinyModel(), context=context)
    write_checkpoint(directory / "model", model)
    stage = load_registry().provider(args.engine).create()
    options = dict(option.split("=", 1) for option in args.option)
    shard = Shard("model", 0, model.layers, model.layers)
    stage.load(LoadRequest(shard, directory / "model", context, options), lambda done, total: None)
    return stage


def measure(stage: StageEngine, prompt: int, streams: int, steps: int, rounds: int) -> dict[str, float]:
    """Bytes of one copy of the prompt; times that the copies take as much; milliseconds of a frame of all streams with
    and without shared positions, and the median of the ratios of the rounds (below 1: sharing is faster)."""
    if not isinstance(stage, SequenceCopier) or not isinstance(stage, SequenceSaver):
        raise InputError("this engine cannot copy or save sequences")
    most, empty = prompt + ROOM, stage.memory_bytes()
    source, together = 1, range(2, 2 + streams)
    apart = range(2 + streams, 2 + 2 * streams)
    stage.insert(source, most)
    for pos0 in range(0, prompt, 512):
        n = min(512, prompt - pos0)
        stage.forward(StageInput((Row(source, pos0, n, 1),), _tokens(n), {}))
    one_copy, saved = stage.memory_bytes() - empty, stage.save(source)
    for sequence in together:
        stage.copy(source, sequence, prompt, most)
    stage.remove(source)
    copies = stage.memory_bytes() - empty
    for sequence in apart:
        stage.restore(sequence, most, saved)
    taken: dict[range, list[float]] = {together: [], apart: []}
    at = prompt
    for turn in range(rounds + 1):
        for sequences in (together, apart) if turn % 2 else (apart, together):
            seconds = _decode(stage, sequences, at, steps)
            if turn:  # the first round joins the rows
                taken[sequences].append(seconds)
        at += steps
    ratios = [one / other for one, other in zip(taken[together], taken[apart], strict=True)]
    return {
        "one_copy_bytes": one_copy,
        "copies": round(copies / one_copy, 3),
        "shared_ms": round(1000 * statistics.median(taken[together]) / steps, 3),
        "separate_ms": round(1000 * statistics.median(taken[apart]) / steps, 3),
        "ratio": round(statistics.median(ratios), 3),
    }


def _decode(stage: StageEngine, sequences: Sequence[int], pos0: int, steps: int) -> float:
    """Seconds of so many frames with one row of each sequence."""
    began = time.perf_counter()
    for step in range(steps):
        rows = tuple(Row(sequence, pos0 + step, 1, 1) for sequence in sequences)
        output = stage.forward(StageInput(rows, _tokens(len(rows)), {}))
        if output.faults:
            raise InputError(output.faults[0].message)
    return time.perf_counter() - began


def _tokens(count: int) -> tuple[int, ...]:
    return tuple(3 + 7 * place % 50 for place in range(count))


def lookup_s(blocks: int = BLOCKS) -> float:
    """Seconds of a lookup in an index of so many blocks, the median of 200: half of the prompts begin like a known
    sequence. Sequences have 100 blocks, of which half of them share the first 50 with others."""
    rng, index = random.Random(1), PrefixIndex()
    bases = [[rng.randrange(50_000) for _ in range(50 * BLOCK_TOKENS)] for _ in range(10)]
    known: list[list[int]] = []
    while index.num_blocks < blocks:
        begin = rng.choice(bases) if len(known) % 2 else []
        known.append([*begin, *(rng.randrange(50_000) for _ in range(100 * BLOCK_TOKENS - len(begin)))])
        index.add(len(known), content_of(known[-1]))
    prompts = [
        content_of(rng.choice(known)[:LOOKUP_TOKENS] if turn % 2 else rng.choice(bases)[:LOOKUP_TOKENS])
        for turn in range(200)
    ]
    seconds: list[float] = []
    for content in prompts:
        began = time.perf_counter()
        index.match(content)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
