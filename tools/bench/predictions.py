"""Compares what previews predict with what a client then gets: `python -m tools.bench predictions`.

For each engine a node with an empty home measures a random model, and its preview predicts tokens per second and the
time to the first token. Then the model is placed, and one client after another asks it. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli.bench.engines import real_engines
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import free_port
from exo_mesh.cli.client.local_mesh import local_mesh
from exo_mesh.cli.tables import print_json
from exo_mesh.errors import DeadlineError, InputError
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint

MEASURED_WITHIN_S = 240.0
"""A node measures nothing while other programs use the machine; a second try follows after a minute, a third after two
more."""

REQUEST_S = 300.0
POLL_S = 1.0
NUM_IDS = 200
"""Ids of the prompts, which every random model has."""


def add_parser(subparsers: Any) -> None:
    """Adds `predictions` to the verbs of `python -m tools.bench`."""
    text = "what previews predict, beside what a client then gets"
    parser = subparsers.add_parser("predictions", help=text, description=__doc__)
    parser.add_argument("--parameters", type=int, default=200_000_000, metavar="N", help="of the model, in bfloat16")
    parser.add_argument("--engines", metavar="A,B", help="only these engines (default: all that compute)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="requests")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a line per engine. Raises DeadlineError if an engine is not measured in time, as on a busy machine."""
    if args.rounds < 1 or args.tokens < 2:
        raise InputError("predictions needs a round, and answers of at least 2 tokens")
    engines = args.engines.split(",") if args.engines else real_engines()
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
        model_dir = write_checkpoint(Path(scratch) / "random", model_of_size(args.parameters), repeat=True)
        results = [_compare(engine, model_dir, args.rounds, args.tokens) for engine in engines]
    if args.json:
        print_json({"parameters": args.parameters, "engines": results})
    else:
        print(_table(results))
    return 0


def _compare(engine: str, model_dir: Path, rounds: int, tokens: int) -> dict[str, Any]:
    flags = ["--engine", engine, "--models-dir", str(model_dir), "--context-limit", "1024"]
    flags += ["--measure-engines", "on"]
    with local_mesh(1, flags, "predictions", api_port=free_port()) as mesh:
        mesh.wait_until_joined()
        client = mesh.client()
        predicted = _predicted(client, model_dir.name)
        client.post("/instance", {"model": model_dir.name}, REQUEST_S)
        rng = random.Random(7)
        times = []
        for _ in range(rounds + 1):
            prompt = [rng.randrange(3, NUM_IDS) for _ in range(predicted["prompt_tokens"])]
            body = {"model": model_dir.name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
            times.append(client.post("/bench/completions", {**body, "temperature": 0}, REQUEST_S)["bench"])
    rounds_s = times[1:]  # the first request warms up
    measured = {
        "tokens_per_s": statistics.median(one["decode_tokens_per_s"] for one in rounds_s),
        "ttft_s": statistics.median(one["ttft_s"] for one in rounds_s),
    }
    ratios = {name: round(measured[name] / predicted[name], 3) for name in measured}
    return {"engine": engine, "predicted": predicted, "measured": measured, "ratio": ratios}


def _predicted(client: ApiClient, model: str) -> dict[str, Any]:
    end = time.monotonic() + MEASURED_WITHIN_S
    while time.monotonic() < end:
        first = client.get(f"/instance/previews?model={model}", REQUEST_S)["previews"][0]
        found: dict[str, Any] | None = first.get("predicted")
        if found is not None:
            return found
        time.sleep(POLL_S)
    raise DeadlineError(f"no prediction within {MEASURED_WITHIN_S:g} s; see the node's log")


def _table(results: list[dict[str, Any]]) -> str:
    header = ("ENGINE", "TOKENS/S PREDICTED", "MEASURED", "RATIO", "TTFT PREDICTED", "MEASURED", "RATIO")
    rows = [
        [
            one["engine"],
            *(f"{one[which]['tokens_per_s']:.2f}" for which in ("predicted", "measured", "ratio")),
            *(f"{one[which]['ttft_s']:.3f}" for which in ("predicted", "measured", "ratio")),
        ]
        for one in results
    ]
    return columns(header, rows)
