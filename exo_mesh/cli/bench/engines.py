"""Measure the speed of the engines on this machine with one checkpoint, in one run and one table.

Each engine runs the whole model through the contract of its stages, in turns with the generate loop of its own library.
Decoding reads every weight once per step, so its speed is also shown as a share of the memory bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import to_builtins

from exo_mesh.base.printable import quoted
from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli.bench.measuring import MeasuringChild, ask_once, engine_command
from exo_mesh.cli.bench.memory import memory_table
from exo_mesh.cli.bench.result import BenchResult
from exo_mesh.engine.measure import decode_bytes
from exo_mesh.engine.registry import load_registry
from exo_mesh.errors import EngineError, InputError, MeshError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint
from exo_mesh.weights.store import model_dir_of

VARIANTS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "torch": ({"dtype": "float32"}, {"dtype": "bfloat16"}),
    "llamacpp": ({}, {"quant": "q8_0"}, {"quant": "q4_0"}),
}
"""Options to measure an engine with; other engines are measured with their defaults only."""

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}


class EngineWork(msgspec.Struct, frozen=True):
    """The work of each loop in tokens and rounds, and the deadline of a child for all of it."""

    prompt: int
    steps: int
    rounds: int
    deadline_s: float


class Line(msgspec.Struct, frozen=True):
    """A row of the table: medians over the rounds, or the reason why there are none.

    of_bandwidth: bytes of weights read per second as a share of the memory bandwidth. ratio: decode speed of the engine
    divided by the decode speed of its own library in the same rounds.
    """

    name: str
    reason: str = ""
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    of_bandwidth: float | None = None
    ratio: float | None = None
    bandwidth: Mapping[str, Any] | None = None


def add_parser(subparsers: Any) -> None:
    """Adds the verb `exo-mesh bench engines`."""
    parser = subparsers.add_parser(
        "engines", help="speed and memory of the engines on this machine", description=__doc__
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="NAME", help="a model on this machine, its directory, or a GGUF file")
    what.add_argument("--random", metavar="SIZE", default="150M", help="a random Llama with this many weights (150M)")
    parser.add_argument("--engines", metavar="A,B", help="only these engines (default: all that compute)")
    parser.add_argument("--prompt", type=count(16384), default=128, metavar="N", help="tokens of the prompt (128)")
    parser.add_argument("--steps", type=count(4096), default=32, metavar="N", help="decode steps (32)")
    parser.add_argument("--rounds", type=count(100), default=3, metavar="N", help="rounds of each engine (3)")
    parser.add_argument("--slice", action="store_true", help="measure a few layers only, with 1 to 16 rows")
    parser.add_argument(
        "--memory", action="store_true", help="measure the peak memory of two stages of a 1.5 GB checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> BenchResult:
    """Measures speed or memory, depending on the flags."""
    names = args.engines.split(",") if args.engines else real_engines()
    for name in names:
        load_registry().provider(name)  # raises for an unknown engine before anything is written
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
        if args.memory:
            table = memory_table(names, Path(scratch))
            result: dict[str, Any] = {
                "memory": [to_builtins(row) for row in table.rows],
                "checkpoint": table.checkpoint,
            }
            text = table.text()
        else:
            model_dir, label = _model(args, Path(scratch))
            if args.slice:
                result = {"model": label, "slices": [_slice(name, model_dir) for name in names]}
                text = _slices_text(label, result["slices"])
            else:
                work = EngineWork(args.prompt, args.steps, args.rounds, 600.0)
                lines = [line for name in names for line in measure_engine(name, model_dir, work)]
                result = {
                    "model": label,
                    "work": to_builtins(work),
                    "engines": [to_builtins(line) for line in lines],
                }
                text = _lines_text(label, work, lines)
    return BenchResult({"bench": "engines", **result}, text)


def real_engines() -> list[str]:
    """The engines that `--engine auto` may choose; the others, such as dummy, compute nothing useful."""
    found = load_registry().providers.items()
    return sorted(name for name, provider in found if provider.availability().preference >= 0)


def measure_engine(name: str, model_dir: Path, work: EngineWork) -> Iterator[Line]:
    """Measures an engine in each of its variants; after each line comes the line of its library's loop, if any."""
    reason = why_not(name, model_dir)
    for options in VARIANTS.get(name, ({},)):
        label = " ".join((name, *options.values()))
        if reason:
            yield Line(label, reason)
            continue
        try:
            yield from _measure_variant(name, label, model_dir, options, work)
        except MeshError as exc:
            yield Line(label, str(exc))


def why_not(name: str, model_dir: Path) -> str:
    """The reason why an engine cannot run a model here; "" if it can. Raises InputError for an unknown engine."""
    provider = load_registry().provider(name)
    look = provider.availability()
    if not look.available:
        return f"{look.reason} ({look.remedy})" if look.remedy else look.reason
    if provider.kind != "stage":
        return "takes whole models, while this benchmark measures engines that run layers"
    architecture = read_card(model_dir, "bench").architecture
    return "" if provider.supports(architecture) else f"does not run {architecture} models"


def _measure_variant(
    name: str, label: str, model_dir: Path, options: Mapping[str, str], work: EngineWork
) -> Iterator[Line]:
    """Measures the engine and its library in turns, so that a slowdown of the machine affects both."""
    with contextlib.ExitStack() as stack:
        command = engine_command(name, model_dir, options, work.deadline_s)
        ours = stack.enter_context(MeasuringChild([*command, "--what", "engine"], work.deadline_s))
        theirs = stack.enter_context(MeasuringChild([*command, "--what", "library"], work.deadline_s))
        loops, ready, why = [ours], ours.read(), ""
        try:
            theirs.read()
            loops.append(theirs)
        except EngineError as exc:
            why = str(exc)
        for loop in loops:
            loop.ask(f"{work.prompt} 2")  # the first forward compiles kernels and maps pages
        rounds = [[loop.ask(f"{work.prompt} {work.steps}") for loop in loops] for _ in range(work.rounds)]
    figures = [_speeds([one[index] for one in rounds], work.prompt) for index in range(len(loops))]
    bandwidth = ready["bandwidth"]
    read = decode_bytes(read_card(model_dir, "bench"), ready["held_bytes"])
    ratio = figures[0][1] / figures[1][1] if len(figures) > 1 else None
    for index, (prefill, decode) in enumerate(figures):
        fraction = read * decode / bandwidth["bytes_per_s"] if read else None
        title = label if index == 0 else "  its library's own loop"
        yield Line(title, "", prefill, decode, fraction, ratio if index == 0 else None, bandwidth)
    if why:
        yield Line("  its library's own loop", why)


def _speeds(rounds: Sequence[Mapping[str, float]], prompt: int) -> tuple[float, float]:
    """(prefill tokens/s, decode tokens/s), medians over the rounds."""
    prefill = median(prompt / one["prefill_s"] for one in rounds)
    return prefill, median(one["num_steps"] / one["decode_s"] for one in rounds)


def _slice(name: str, model_dir: Path) -> dict[str, Any]:
    reason = why_not(name, model_dir)
    if reason:
        return {"engine": name, "error": reason}
    try:
        return {"engine": name, **ask_once(engine_command(name, model_dir, {}, 120.0), 120.0)}
    except EngineError as exc:
        return {"engine": name, "error": str(exc)}


def _model(args: argparse.Namespace, scratch: Path) -> tuple[Path, str]:
    """(directory, label) of the named model, or of a random model that is written to `scratch`."""
    if args.model:
        return model_dir_of(args.model, scratch / "gguf"), args.model
    model = model_of_size(parse_size(args.random))
    return write_checkpoint(scratch / "random", model, repeat=True), f"random Llama of {args.random} weights, bfloat16"


def parse_size(text: str) -> int:
    """Parses a number of weights such as "150M" or "1.5B". Raises InputError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBG])", text.strip().upper())
    if found is None:
        raise InputError(f"{quoted(text)} is not a size like 150M or 1.5B", param="random")
    return round(float(found[1]) * _UNITS[found[2]])


def count(most: int) -> Any:
    """Returns an argparse type: a whole number from 1 to `most`."""

    def parse(text: str) -> int:
        if not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {most}")
        return int(text)

    return parse


def _lines_text(label: str, work: EngineWork, lines: Sequence[Line]) -> str:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = [
        [
            line.name,
            number(line.prefill_tokens_per_s, 1),
            number(line.decode_tokens_per_s, 1),
            "-" if line.of_bandwidth is None else f"{100 * line.of_bandwidth:.0f} %",
            number(line.ratio, 2),
            line.reason,
        ]
        for line in lines
    ]
    gb = [line.bandwidth["bytes_per_s"] / 1e9 for line in lines if line.bandwidth]
    head = (
        f"{label}; a prompt of {work.prompt} tokens, then {work.steps} steps; medians of {work.rounds} rounds in turns"
    )
    roof = f"memory: {min(gb):.1f} to {max(gb):.1f} GB/s, measured with each engine" if gb else ""
    titles = ("ENGINE", "PREFILL tok/s", "DECODE tok/s", "OF BANDWIDTH", "VS LIBRARY", "")
    return "\n".join([head, *([roof] if roof else []), columns(titles, rows)])


def _slices_text(label: str, slices: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [one["engine"], "", "", "", "", "", "", one["error"]]
        if "error" in one
        else [
            one["engine"],
            f"{one['start']}:{one['stop']}/{one['num_layers']}",
            *(f"{1000 * one['decode_s'][rows]:.2f}" for rows in ("1", "2", "4", "8", "16")),
            f"{one['prefill_tokens'] / one['prefill_s']:.0f} tok/s of {one['prefill_tokens']}",
        ]
        for one in slices
    ]
    titles = ("ENGINE", "LAYERS", "1 row ms", "2", "4", "8", "16", "PREFILL")
    return "\n".join([label, columns(titles, rows)])
