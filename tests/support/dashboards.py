"""The Grafana dashboards of monitoring/ as they are checked in, and what Grafana puts into their queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
FILES = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))


@dataclass(frozen=True, slots=True)
class Target:
    """One query of one panel."""

    board: str
    panel: str
    letter: str
    expr: str

    @property
    def name(self) -> str:
        return f"{self.board} / {self.panel} / {self.letter}"


def load(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels but the headings."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def targets() -> Iterator[Target]:
    """Every query of every dashboard."""
    for path in FILES:
        for panel in panels(load(path)):
            for target in panel["targets"]:
                yield Target(path.stem, panel["title"], target["refId"], target["expr"])


def filled_in(expr: str, interval: str) -> str:
    """A query as Prometheus gets it from Grafana when "All" is chosen everywhere. interval: such as 1m."""
    return re.sub(r"\$(?!_)\w+", ".+", expr.replace("$__rate_interval", interval))
