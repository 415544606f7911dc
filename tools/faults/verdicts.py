"""The bars that random runs must meet besides right texts, and their summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tools.faults.faults import Fault

MAX_GAP_S = {
    Fault.RUNNER_KILL: 5.0,
    Fault.NODE_KILL: 5.0,
    Fault.RUNNER_STOP: 8.0,
    Fault.NODE_STOP: 8.0,
    Fault.MACHINE_STOP: 7.5,
    Fault.ONE_WAY_LOSS: 7.5,
}
"""The longest pause that a client may see, on a quiet machine with the demo model."""

WARM_LOADS = 2.0
"""Longest time from the first sign of a fault to the next text, as a multiple of the time to place the model with warm
files."""

MUST_BE_AGREED = (Fault.MACHINE_STOP, Fault.ONE_WAY_LOSS)
"""Faults after which the mesh must first agree that a peer is gone, which takes longer than loading the model."""

Outcome = Mapping[str, Any]
"""A run, as `tools.faults.drawn.Outcome.describe` returns it."""


def misses(outcome: Outcome) -> list[str]:
    """Lists the bars that one run did not meet."""
    found = []
    bar_s = MAX_GAP_S.get(Fault(outcome["fault"]))
    if bar_s is not None and outcome["gap_s"] > bar_s:
        found.append(f"gap {outcome['gap_s']:.1f} s, bar {bar_s:g} s")
    allowed_s = WARM_LOADS * outcome["warm_load_s"]
    is_timed = bar_s is not None and Fault(outcome["fault"]) not in MUST_BE_AGREED
    if is_timed and outcome["bytes_loaded"] and (work_s := recovery_s(outcome)) > allowed_s:
        found.append(f"{work_s:.1f} s from the first sign to text, bar {allowed_s:.1f} s")
    if outcome["outcome"] != "stop" or outcome["tokens_lost"]:
        found.append(f"{outcome['outcome']}, {outcome['tokens_lost']} characters lost")
    return found


def recovery_s(outcome: Outcome) -> float:
    """The gap minus the time until the first sign; 0 if there was no pause after it."""
    detected_s = outcome["detected_s"]
    return 0.0 if detected_s is None else max(0.0, float(outcome["gap_s"]) - float(detected_s))


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns a Markdown table with one row per fault."""
    head = "| fault | runs | detected after, s | recovered after, s | bytes loaded | tokens lost | bars |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    for fault in Fault:
        mine = [one for one in outcomes if one["fault"] == fault.value]
        if not mine:
            continue
        detected = [one["detected_s"] for one in mine if one["detected_s"] is not None]
        bar = f"{MAX_GAP_S[fault]:g} s: " if fault in MAX_GAP_S else ""
        met = sum(not misses(one) for one in mine)
        rows.append(
            f"| {fault.value} | {len(mine)} | {_spread(detected)} | {_spread([one['gap_s'] for one in mine])} | "
            f"{_megabytes(mine)} | {sum(one['tokens_lost'] for one in mine)} | {bar}{met} of {len(mine)} |"
        )
    return rows


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} (to {max(values):.2f})" if values else "-"


def _megabytes(outcomes: Sequence[Outcome]) -> str:
    values = sorted({round(one["bytes_loaded"] / 1e6, 1) for one in outcomes})
    return f"{values[0]:g}" + (f" to {values[-1]:g}" if len(values) > 1 else "") + " MB"
