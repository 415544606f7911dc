"""Compare two recorded runs of one benchmark, or your own runs with the published figures.

Takes files that `exo-mesh bench … --json` wrote. For each figure that both runs have it prints both values and the
second divided by the first; with --rounds also the range of that ratio over the rounds. --bar fails the command if a
ratio misses it. `published` as the first name puts the figures of docs/how-it-works/benchmarks.md beside your runs.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli.bench.result import BenchResult
from exo_mesh.cli.bench.serve_report import NAMES
from exo_mesh.settings.config import ConfigError

MAX_BYTES = 8 << 20
PUBLISHED = "published"
SERVE_FIGURES = (
    "tokens_per_s",
    "prompt_tokens_per_s",
    "ttft_s.p50",
    "ttft_s.p99",
    "itl_s.p50",
    "itl_s.p99",
    "against_one",
)
"""Of a run of bench serve; everything else in it describes the load or is too noisy to compare."""
_NOT_FIGURES = ("cores", "peers", "rounds", "work", "payload_bytes", "prompt", "tokens", "long", "frames_counted")
_SETTINGS = ("version", "peers", "engine", "engine_options", "options", "model", "cores", "prompt", "tokens", "long")
"""What two runs should have in common; where they do not, the comparison says so."""
_SIGNS = {">=": operator.ge, "<=": operator.le}


class Figure(msgspec.Struct, frozen=True):
    """A measured value. rounds: its values in single rounds, if several were measured."""

    value: float
    rounds: Sequence[float] = ()

    @property
    def range(self) -> tuple[float, float]:
        values = self.rounds or (self.value,)
        return min(values), max(values)


Figures = Mapping[str, Figure]
"""Figures by name: `what: figure`, such as `ring, 4 at once, 32 x 128: ttft_s.p50`."""


class PublishedFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of published.json. what: its row in docs/how-it-works/benchmarks.md. bench, scenario, figure: the run and
    its figure that measure the same. value: in the unit of that figure; text: as the page writes it."""

    what: str
    bench: str
    figure: str
    value: float
    text: str
    recorded: str
    command: str
    scenario: str = ""


class Bar(msgspec.Struct, frozen=True):
    """A limit of a ratio: `tokens_per_s>=0.98`."""

    name: str
    sign: str
    limit: float

    def is_missed(self, ratio: float) -> bool:
        return not _SIGNS[self.sign](ratio, self.limit)

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.limit:g}"


def add_parser(subparsers: Any) -> None:
    """Adds the verb `exo-mesh bench compare`."""
    parser = subparsers.add_parser("compare", help="compare recorded runs", description=__doc__)
    parser.add_argument("before", metavar="BEFORE", help=f"a JSON file, or {PUBLISHED}")
    parser.add_argument("after", metavar="AFTER", nargs="+", help="a JSON file; several only with published figures")
    parser.add_argument(
        "--bar",
        action="append",
        default=[],
        metavar="FIGURE>=R",
        help="fail unless AFTER / BEFORE of this figure is at least (>=) or at most (<=) R; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> BenchResult:
    """Compares the named runs. Raises ConfigError for files that cannot be compared."""
    bars = [parse_bar(text) for text in args.bar]
    after = [_read(Path(name)) for name in args.after]
    if args.before == PUBLISHED:
        if bars:
            raise ConfigError(f"--bar compares two runs of one machine, not a run with the {PUBLISHED} figures")
        return beside_published(published(), after)
    if len(after) > 1:
        raise ConfigError(f"{args.after[1]}: two files are compared; several need {PUBLISHED} as the first name")
    before = _read(Path(args.before))
    for name in ("bench", "scenario"):
        if before.get(name, "") != after[0].get(name, ""):
            raise ConfigError(f"{args.before} and {args.after[0]} differ in {name}: they measure different things")
    found = compared(figures_of(before), figures_of(after[0]), bars)
    differing = [name for name in _SETTINGS if before.get(name) != after[0].get(name)]
    note = f"\nthe runs differ in {', '.join(differing)}" if differing else ""
    return replace(found, values={**found.values, "differing": differing}, text=found.text + note)


def parse_bar(text: str) -> Bar:
    """Parses a bar. Raises ConfigError."""
    found = re.fullmatch(r"\s*([\w.]{1,100})\s*(>=|<=)\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*", text)
    if found is None:
        raise ConfigError(f"--bar {text}: must be FIGURE>=RATIO or FIGURE<=RATIO, such as tokens_per_s>=0.98")
    return Bar(found[1], found[2], float(found[3]))


def compared(before: Figures, after: Figures, bars: Sequence[Bar] = ()) -> BenchResult:
    """Ratios of the figures that both runs have. Raises ConfigError if there are none, or none for a bar."""
    names = [name for name in before if name in after and before[name].value]
    if not names:
        raise ConfigError("the two runs have no figure in common")
    rows = [_compared_row(name, before[name], after[name], bars) for name in names]
    for bar in bars:
        if not any(bar.name == _figure(name) for name in names):
            known = ", ".join(dict.fromkeys(map(_figure, names)))
            raise ConfigError(f"--bar {bar}: the runs have no figure {bar.name} in common; they have {known}")
    misses = tuple(f"{row['name']} is {row['ratio']:.3f} of before, not {bar}" for row in rows for bar in row["missed"])
    for row in rows:
        row["missed"] = [str(bar) for bar in row["missed"]]
    alone = sorted(before.keys() ^ after.keys())
    values = {"bench": "compare", "figures": rows, "only_in_one": alone}
    shown = [
        [row["name"], f"{row['before']:g}", f"{row['after']:g}", f"{row['ratio']:.3f}", _range(row), *row["missed"][:1]]
        for row in rows
    ]
    table = columns(["", "before", "after", "ratio", "rounds", "missed"], [[*row, ""][:6] for row in shown])
    only = [f"only in one of the runs: {', '.join(alone)}"] if alone else []
    return BenchResult(values, "\n".join([table, *only]), misses)


def _compared_row(name: str, before: Figure, after: Figure, bars: Sequence[Bar]) -> dict[str, Any]:
    ratio = after.value / before.value
    row: dict[str, Any] = {"name": name, "before": before.value, "after": after.value, "ratio": round(ratio, 4)}
    (low, high), (least, most) = before.range, after.range
    if before.rounds and after.rounds and low > 0:
        row |= {"low": round(least / high, 4), "high": round(most / low, 4)}
    return row | {"missed": [bar for bar in bars if bar.name == _figure(name) and bar.is_missed(ratio)]}


def _range(row: Mapping[str, Any]) -> str:
    return f"{row['low']:.3f} to {row['high']:.3f}" if "low" in row else "-"


def _figure(name: str) -> str:
    """The part of a figure's name that a bar names."""
    return name.rpartition(": ")[2]


def published() -> list[PublishedFigure]:
    """The published figures that a user can measure with one command."""
    data = (resources.files("exo_mesh.cli.bench") / "published.json").read_bytes()
    return msgspec.json.decode(data, type=list[PublishedFigure])


def beside_published(ours: Sequence[PublishedFigure], runs: Sequence[Mapping[str, Any]]) -> BenchResult:
    """The published figures, and the same of the runs where they have them."""
    rows = []
    for one in ours:
        fitting = (run for run in runs if (run.get("bench"), run.get("scenario", "")) == (one.bench, one.scenario))
        found = next((value for value in (figures_of(run).get(one.figure) for run in fitting) if value), None)
        ratio = None if found is None else round(found.value / one.value, 3)
        rows.append({**msgspec.structs.asdict(one), "yours": None if found is None else found.value, "ratio": ratio})
    table = columns(
        ["", "published", "recorded", "yours", "ratio", "command"],
        [
            [
                row["what"],
                row["text"],
                row["recorded"],
                "-" if row["yours"] is None else f"{row['yours']:g}",
                "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
                row["command"],
            ]
            for row in rows
        ],
    )
    return BenchResult({"bench": "compare", "figures": rows}, table)


def figures_of(result: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of a result of any benchmark."""
    if result.get("bench") == "serve":
        return dict(_serve_figures(result))
    return {name: Figure(value) for name, value in _numbers(result, "")}


def _serve_figures(result: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    systems = [key for key, value in result.items() if isinstance(value, list) and value and "prompt" in value[0]]
    for key in (*NAMES, *(key for key in systems if key not in NAMES)):
        for one in result.get(key, ()):
            amount = f"{one['rate']:g} per s" if "rate" in one else f"{one['streams']} at once"
            for figure in SERVE_FIGURES:
                if (value := _at(one, figure)) is not None:
                    rounds = [_at(lone, figure) or 0.0 for lone in one.get("rounds", ())]
                    name = f"{NAMES.get(key, key)}, {amount}, {one['prompt']} x {one['tokens']}: {figure}"
                    yield name, Figure(value, tuple(rounds))


def _at(values: Mapping[str, Any], path: str) -> float | None:
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """(path, number) of every number in a result."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _NOT_FIGURES:
                yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            named = (inner.get("engine") or inner.get("name")) if isinstance(inner, Mapping) else None
            yield from _numbers(inner, f"{path}.{named or index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def _read(path: Path) -> dict[str, Any]:
    """A recorded result. Raises ConfigError."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES} bytes, so no benchmark wrote it")
    try:
        result = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: is not JSON: {exc}") from exc
    if not isinstance(result, dict) or not isinstance(result.get("bench"), str):
        raise ConfigError(f'{path}: is no result of a benchmark (it has no "bench"); record one with --json')
    return result
