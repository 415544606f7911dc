"""Speed of an engine beside other programs: `python -m tools.bench busy`.

Starts processes that compute without end, one more than that for a machine with a load, and times the prompt and the
steps of an answer with the engine's own number of threads, and with other numbers, in turns; then the same on the quiet
machine. Prints the speed of each way divided by that of one thread in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli.bench.engines import count, parse_size
from exo_mesh.cli.bench.measuring import MeasuringChild, engine_command
from exo_mesh.cli.tables import print_json
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint
from tools.bench.sides import hogs

DEADLINE_S = 900.0


def add_parser(subparsers: Any) -> None:
    """Adds `busy` to the verbs of `python -m tools.bench`."""
    parser = subparsers.add_parser("busy", help="speed of an engine beside other programs", description=__doc__)
    parser.add_argument("--engine", default="numpy", help="numpy, torch or llamacpp (numpy)")
    parser.add_argument("--hogs", type=count(1000), default=20, metavar="N", help="other programs (20)")
    parser.add_argument("--size", default="30M", help="weights of the model (30M)")
    parser.add_argument("--prompt", type=count(4096), default=128, metavar="TOKENS", help="of a prompt (128)")
    parser.add_argument("--steps", type=count(1000), default=4, metavar="N", help="tokens after it (4)")
    parser.add_argument("--turns", type=count(100), default=5, metavar="N", help="turns (5)")
    parser.add_argument("--threads", default="auto,1", metavar="A,B", help="numbers of threads (auto,1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures busy and quiet, and prints the table."""
    ways = args.threads.split(",")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="exo-mesh-bench-"))
        directory = write_checkpoint(Path(scratch) / "model", model_of_size(parse_size(args.size)))
        children = {way: stack.enter_context(_child(args.engine, directory, way)) for way in ways}
        for child in children.values():
            child.read()
        with hogs(args.hogs):
            busy = _turns(children, args.prompt, args.steps, args.turns)
        quiet = _turns(children, args.prompt, args.steps, args.turns)
    found = {"busy": busy, "quiet": quiet}
    if args.json:
        print_json(found)
    else:
        print(columns(("MACHINE", "THREADS", "PROMPT (tokens/s)", "BESIDE 1", "STEPS (tokens/s)", "BESIDE 1"), [
            [machine, way, *_cells(figures, way)] for machine, figures in found.items() for way in figures
        ]))  # fmt: skip
    return 0


def _cells(figures: Mapping[str, Mapping[str, float]], way: str) -> Iterator[str]:
    for phase in ("prefill", "decode"):
        yield f"{figures[way][phase]:.1f}"
        yield f"{figures[way][phase] / figures['1'][phase]:.2f}" if "1" in figures else "-"


def _child(engine: str, directory: Path, threads: str) -> MeasuringChild:
    options = {} if threads == "auto" else {"threads": threads}
    return MeasuringChild([*engine_command(engine, directory, options, DEADLINE_S), "--what", "engine"], DEADLINE_S)


def _turns(children: Mapping[str, MeasuringChild], prompt: int, steps: int, turns: int) -> dict[str, dict[str, float]]:
    """The median speeds of each way, in tokens per second. The first turn is not counted."""
    prefill: dict[str, list[float]] = {way: [] for way in children}
    decode: dict[str, list[float]] = {way: [] for way in children}
    for turn in range(turns + 1):
        for way, child in children.items():
            answer = child.ask(f"{prompt} {steps}")
            if turn:
                prefill[way].append(prompt / answer["prefill_s"])
                decode[way].append(answer["num_steps"] / answer["decode_s"])
    return {way: {"prefill": median(prefill[way]), "decode": median(decode[way])} for way in children}
