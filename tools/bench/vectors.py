"""Measures how fast a mesh makes vectors: `python -m tools.bench vectors`.

A mesh of nodes on this machine runs a model on one and on several stages. Calls of /v1/embeddings with 1, 16 and 256
texts of equal length follow each other, alternately; figures are medians of the rounds. Then a chat streams alone, and
beside calls of 256 texts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.local_mesh import local_mesh
from exo_mesh.errors import InputError

SIZES = (1, 16, 256)
"""Texts of a call."""

DEADLINE_S = 600.0
STREAM_TOKENS = 128


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("vectors", help="how fast a mesh makes vectors of texts", description=__doc__)
    parser.add_argument("--model", default="exo-mesh-demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--models-dir", default="", help="where the nodes look for the model")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if min(args.stages) < 1 or args.tokens < 1 or args.rounds < 1:
        raise InputError("vectors needs at least 1 stage, 1 token and 1 round")
    flags = ["--engine", args.engine, *(["--models-dir", args.models_dir] if args.models_dir else [])]
    with local_mesh(max(args.stages), flags, "vectors") as mesh:
        mesh.wait_until_joined()
        for stages in args.stages:
            _measure(mesh.client(), args, stages)
    return 0


def _measure(client: ApiClient, args: argparse.Namespace, stages: int) -> None:
    """Prints the figures of a ring of so many stages, and ends the ring."""
    placed = client.post("/instance", {"model": args.model, "min_peers": stages}, DEADLINE_S)
    texts = _texts(max(SIZES), args.tokens)
    taken_s: dict[int, list[float]] = {size: [] for size in SIZES}
    for index in range(args.rounds + 1):
        for size in SIZES:
            began = time.perf_counter()
            client.post("/v1/embeddings", {"model": args.model, "input": texts[:size]}, DEADLINE_S)
            if index:  # the first round warms up
                taken_s[size].append(time.perf_counter() - began)
    for size, seconds in taken_s.items():
        median_s = statistics.median(seconds)
        print(
            f"{args.model}, {len(placed['stages'])} stages, calls of {size:3} texts of {args.tokens} tokens: "
            f"{1000 * median_s:7.1f} ms, {size / median_s:7.1f} texts/s, {size * args.tokens / median_s:8.0f} tokens/s",
            flush=True,
        )
    if "text_generation" in client.get(f"/v1/models/{args.model}")["tasks"]:
        _beside_a_stream(client, args, texts)
    client.delete(f"/instance/{placed['id']}", DEADLINE_S)


def _beside_a_stream(client: ApiClient, args: argparse.Namespace, texts: Sequence[Sequence[int]]) -> None:
    """Prints how much later one stream begins, and how much slower it is, beside calls for vectors."""
    body = {"model": args.model, "prompt": [7, 8, 9], "max_tokens": STREAM_TOKENS, "ignore_eos": True, "temperature": 0}

    def streamed_ms() -> tuple[float, float]:
        """Milliseconds to the first token, and from there for each further one."""
        times = [time.perf_counter()]
        for _ in client.stream("/v1/completions", {**body, "stream": True}, silence_s=DEADLINE_S):
            times.append(time.perf_counter())
        return 1000 * (times[1] - times[0]), 1000 * (times[-1] - times[1]) / (STREAM_TOKENS - 1)

    def medians() -> tuple[float, float]:
        first, further = zip(*(streamed_ms() for _ in range(args.rounds)), strict=True)
        return statistics.median(first), statistics.median(further)

    alone = medians()
    ends = threading.Event()

    def load() -> None:
        while not ends.is_set():
            client.post("/v1/embeddings", {"model": args.model, "input": texts}, DEADLINE_S)

    caller = threading.Thread(target=load)
    caller.start()
    try:
        beside = medians()
    finally:
        ends.set()
        caller.join(DEADLINE_S)
    for what, (first_ms, further_ms) in (("alone", alone), ("beside calls for vectors", beside)):
        print(f"{args.model}: a stream {what}: first token {first_ms:.0f} ms, others {further_ms:.2f} ms", flush=True)


def _texts(count: int, tokens: int) -> list[list[int]]:
    """Texts as token ids, which every vocabulary has."""
    rng = random.Random(7)
    return [[rng.randrange(10, 250) for _ in range(tokens)] for _ in range(count)]
