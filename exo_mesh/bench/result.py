"""What a benchmark answers with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured: values for JSON, and the same as text for people."""

    values: Mapping[str, Any]
    text: str
