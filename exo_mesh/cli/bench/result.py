"""The result type of all benchmarks, and one result from several rounds: medians, and each round's figures. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class BenchResult(msgspec.Struct, frozen=True):
    """The result of a benchmark: values for JSON, and the same as text for people. misses: figures worse than a bar
    that the user set; then the command fails."""

    values: Mapping[str, Any]
    text: str
    misses: tuple[str, ...] = ()


_SUMS = ("requests", "failed")
_LOAD = ("streams", "rate", "prompt", "tokens")
_SPREAD = ("tokens_per_s", "prompt_tokens_per_s", "ttft_s", "itl_s")
"""Figures whose rounds are kept."""


def merged(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One run from its rounds: sums of requests, medians of all other figures, and `rounds` with each round's figures
    if there are several."""
    first = rounds[0]
    if len(rounds) == 1:
        return dict(first)
    run = {
        key: value if key in _LOAD else _merge([one[key] for one in rounds if key in one])
        for key, value in first.items()
    }
    run |= {key: sum(one[key] for one in rounds) for key in _SUMS if key in first}
    if "errors" in first:
        run["errors"] = sorted({error for one in rounds for error in one["errors"]})
    if "breakdown" in first:
        run["breakdown"] = _mean([one["breakdown"] for one in rounds])
    run["rounds"] = [{key: one[key] for key in _SPREAD if key in one} for one in rounds]
    return run


def _merge(values: Sequence[Any]) -> Any:
    """The median of numbers, by field of objects and by place of lists."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _merge([one[key] for one in values if key in one]) for key in first}
    if isinstance(first, list):
        return [_merge(list(one)) for one in zip(*values, strict=False)]
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    middle = statistics.median(values)
    return int(middle) if isinstance(first, int) else round(middle, 6)


def _mean(breakdowns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means, so that the parts still add up."""
    return {
        key: {part: round(statistics.fmean(one[key][part] for one in breakdowns), 6) for part in value}
        if isinstance(value, Mapping)
        else round(statistics.fmean(one[key] for one in breakdowns), 6)
        for key, value in breakdowns[0].items()
    }
