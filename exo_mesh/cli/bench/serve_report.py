"""Reports the results of `exo-mesh bench serve`: a table in the terminal, and a picture with --plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exo_mesh.base.telemetry.tables import columns
from exo_mesh.settings.config import ConfigError

NAMES = {"runs": "ring", "group": "group", "one": "one stage"}
"""The systems of `exo-mesh bench serve`: label by key of the result. Rivals add keys of their own."""

_HEADER = [
    "",
    "prompt x output",
    "streams",
    "tok/s",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "busy",
    "bubble",
    "MiB held",
    "J/prompt",
    "J/token",
    "failed",
    "",
]
_FORMATS = (".svg", ".png", ".pdf")


def table(result: Mapping[str, Any], names: Mapping[str, str] = NAMES) -> str:
    """The result as a table with a line for each run."""
    rows = [_row(key, run, names) for key in names for run in result.get(key, ())]
    return columns(_HEADER, rows)


def _row(key: str, run: Mapping[str, Any], names: Mapping[str, str]) -> list[object]:
    row: list[object] = [names[key], f"{run['prompt']} x {run['tokens']}", run.get("streams", f"{run.get('rate')}/s")]
    row.append(f"{run['tokens_per_s']:.1f}")
    row += [_ms(run[kind], quantile) for kind in ("ttft_s", "itl_s") for quantile in ("p50", "p99")]
    row += [" ".join(f"{share:.0%}" for share in run.get(kind, ())) or "-" for kind in ("busy", "bubble")]
    held = run.get("memory_bytes", ())
    row.append(" ".join(f"{size / 2**20:.0f}" for size in held) or "-")
    energy = run.get("energy", {})
    row += [_joules(energy.get(f"joules_per_{what}")) for what in ("prompt", "output_token")]
    ratios = [f"{run[_ratio(other)]:.2f} x {name}" for other, name in names.items() if _ratio(other) in run]
    if "all_reduce_share" in run:
        ratios.append(f"all-reduces take at least {run['all_reduce_share']:.0%} of a step")
    return [*row, run["failed"], ", ".join(ratios)]


def breakdown_table(result: Mapping[str, Any], names: Mapping[str, str] = NAMES) -> str:
    """What each part of a request took, in ms, with a line for each run; "" if that was not measured."""
    runs = [(key, run) for key in names for run in result.get(key, ()) if "breakdown" in run]
    if not runs:
        return ""
    parts = list(runs[0][1]["breakdown"]["parts"])
    header = ["ms of a request", "prompt x output", "streams", "whole", *(part.removesuffix("_s") for part in parts)]
    rows = []
    for key, run in runs:
        found = run["breakdown"]
        load = [names[key], f"{run['prompt']} x {run['tokens']}", run.get("streams", f"{run.get('rate')}/s")]
        rows.append([*load, *(f"{1e3 * seconds:.1f}" for seconds in (found["total_s"], *found["parts"].values()))])
    return columns(header, rows)


def compare(result: dict[str, Any], names: Mapping[str, str] = NAMES) -> None:
    """Adds to each run of the ring (mutates) its tokens per second divided by each other system's at the same load."""
    for other in (key for key in names if key != "runs"):
        for ours, theirs in zip(result.get("runs", ()), result.get(other, ()), strict=False):
            if theirs["tokens_per_s"]:
                ours[_ratio(other)] = round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3)


def _ratio(other: str) -> str:
    """The key in a run of the ring for its tokens per second divided by the tokens per second of `other`."""
    return f"against_{other}"


def _ms(quantiles: Mapping[str, float], name: str) -> str:
    return f"{quantiles[name] * 1e3:.1f} ms" if quantiles else "-"


def _joules(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def check_plot(file: Path) -> None:
    """Raises ConfigError if the picture cannot be made. Called before anything is measured."""
    if file.suffix not in _FORMATS:
        raise ConfigError(f"--plot {file}: the name must end in {', '.join(_FORMATS)}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: the directory does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {file}: matplotlib is not installed: pip install 'exo-mesh[plot]'")


def plot(result: Mapping[str, Any], file: Path, names: Mapping[str, str] = NAMES) -> None:
    """Draws tokens per second, time to first token and time between tokens against the load.

    There is a line for each grid cell of each compared system.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = (
        "tokens per second in total",
        "first token in ms: p50, p99 dotted",
        "between tokens in ms: p50, p99 dotted",
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("requests per second" if "rate" in _first(result, names) else "streams")
        panel.grid(alpha=0.3)
    for label, runs in _lines(result, names):
        load = [run.get("streams", run.get("rate")) for run in runs]
        (line,) = panels[0].plot(load, [run["tokens_per_s"] for run in runs], marker="o", label=label)
        for panel, kind in zip(panels[1:], ("ttft_s", "itl_s"), strict=True):
            for quantile, style in (("p50", "-"), ("p99", ":")):
                values = [1e3 * run[kind].get(quantile, float("nan")) for run in runs]
                panel.plot(load, values, style, marker=".", color=line.get_color())
    for panel in panels:
        panel.set_ylim(bottom=0)  # after the lines are drawn: earlier, it would fix the top limit, too
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    figure.suptitle(f"{result['model']} over {result['peers']} peers, {result['cores']} cores", fontsize=10)
    figure.savefig(file)


def _first(result: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    return next(run for key in names for run in result.get(key, ()))


def _lines(result: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """(label, runs ordered by load) of each curve."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for key, name in names.items():
        for run in result.get(key, ()):
            found.setdefault(f"{name}, {run['prompt']} x {run['tokens']}", []).append(run)
    return list(found.items())
