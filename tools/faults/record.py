"""Rows of the published table, one JSON object per line."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "FAULTS_RECORD"
"""The file to which tests append their rows; without it the rows are only printed."""


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one fault. Seconds since the fault; None if it does not apply.

    name: the class, F1 to F26, or another name. test: the test that covers it.
    """

    name: str
    fault: str
    test: str
    detected_s: float | None = None
    recovered_s: float | None = None
    bytes_loaded: int | None = None
    tokens_lost: int | None = None
    note: str = ""


def keep(row: Row | dict[str, Any]) -> None:
    """Appends the row to the file of VARIABLE; prints it if that is not set."""
    line = json.dumps(asdict(row) if isinstance(row, Row) else row)
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(line + "\n")
    else:
        print("measured:", line)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
