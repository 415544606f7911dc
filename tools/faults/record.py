"""Rows of the published table, one JSON object a line."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "FAULTS_RECORD"
"""The file to which tests add their rows; without it they keep them to themselves."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one fault. Seconds since it; None where there is nothing to say.

    name: the class, F1 to F26, or another name. test: where it is shown.
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
    """Add it to the file of VARIABLE; print it if that is not set."""
    line = json.dumps(asdict(row) if isinstance(row, Row) else row)
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(line + "\n")
    else:
        print("measured:", line)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
