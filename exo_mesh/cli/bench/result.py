"""The result type of all benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of a benchmark: values for JSON, and the same as text for people. misses: figures worse than a bar
    that the user set; then the command fails."""

    values: Mapping[str, Any]
    text: str
    misses: tuple[str, ...] = ()
