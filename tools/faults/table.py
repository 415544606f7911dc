"""Writes the tables of docs/how-it-works/faults.md, between their markers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.faults.classes import CLASSES
from tools.faults.drawn import NUM_CELLS
from tools.faults.verdicts import summary

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-it-works" / "faults.md"


def write_tables(rows: Sequence[Mapping[str, Any]], page: Path = PAGE) -> None:
    """Writes the tables of these records into the page; of two records of one test the later one counts."""
    text = page.read_text()
    text = between(text, "classes", class_table(rows))
    drawn = list({(row["seed"], row["case"]): row for row in rows if row["name"] == "drawn"}.values())
    if drawn:
        text = between(text, "drawn", [_told(drawn), "", *summary(drawn)])
    page.write_text(text)


def between(text: str, name: str, lines: Sequence[str]) -> str:
    """Returns the text with these lines between `<!-- name -->` and `<!-- end -->`."""
    head, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    assert mark and end, f"the page has no markers for {name}"
    return head + mark + "\n".join(lines) + "\n" + end + tail


def class_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns one row for each class and each measured fault of it."""
    measured = {(row["name"], row["fault"]): row for row in rows if row["name"] not in ("drawn", "soak")}
    lines = [
        "| class | fault | detected after, s | recovered after, s | bytes loaded | tokens lost | shown by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in CLASSES.items():
        shown = "<br>".join(f"`{test}`" for test in one.tests)
        more = f"<br>{one.note}" if one.note else ""
        lines.append(f"| {name} | {one.what} | | | | | {shown}{more} |")
        lines += [_row(row) for (of, _), row in measured.items() if of == name]
    others = {name for name, _ in measured} - CLASSES.keys()
    lines += [_row(row) for (of, _), row in measured.items() if of in others]
    return lines


def _row(row: Mapping[str, Any]) -> str:
    loaded = row["bytes_loaded"]
    cells = [
        "" if row["name"] in CLASSES else str(row["name"]),
        "→ " + str(row["fault"]),
        _number(row["detected_s"]),
        _number(row["recovered_s"]),
        "" if loaded is None else f"{loaded / 1e6:.1f} MB",
        "" if row["tokens_lost"] is None else str(row["tokens_lost"]),
        str(row["note"]),
    ]
    return f"| {' | '.join(cells)} |"


def _number(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def _told(drawn: Sequence[Mapping[str, Any]]) -> str:
    cells = {(row["fault"], row["phase"], row["peers"]) for row in drawn}
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in drawn}))
    loads = [row["warm_load_s"] for row in drawn]
    busy = [row["load"] for row in drawn if "load" in row]
    crowd = (
        f" The machine has {os.cpu_count()} cores; its load average was {min(busy):g} to {max(busy):g}." if busy else ""
    )
    return (
        f"Seed {seeds}: {len(drawn)} runs over {len(cells)} of the {NUM_CELLS} cells. "
        f"Placing the model with warm files took {min(loads):.2f} to {max(loads):.2f} s.{crowd}"
    )
