"""Writes the part of docs/reference/architectures.md about transformers: one line for each of its causal families."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from tools.torch_architectures.check import Outcome
from tools.torch_architectures.families import NUM_LAYERS
from tools.torch_architectures.judge import Judgement

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "architectures.md"
TRANSFORMERS = "\n## Families of transformers\n"
"""The heading of this part; tools.architectures.table writes the part before."""

_HEAD = (
    TRANSFORMERS
    + """
Which causal language models of transformers the torch engine runs and splits, found by trying as well. Do not edit:
this part is written by `python -m tools.torch_architectures --all --write` (half an hour of one core).
Versions of the libraries: {versions}.

{summary}

Eight layers each, float32, against transformers' own model on the same random checkpoint: prefill in chunks of 23 and
18 tokens and six decode steps, windows of 16. 3 splits are the whole, one cut and one pair of cuts; 29 are all of them
(`python -m tools.torch_architectures FAMILY`). *Worst difference* is of any logit, 0 for equal bits. *Rows together* is
of three rows of different lengths that decode in common frames, against each alone. *Not judged* is what transformers
itself does not run here with a tiny config that is made from the names of its settings.

| family | cuts | splits tried | worst difference | rows together | KV | rollback | result |
|---|---|---|---|---|---|---|---|
"""
)
_TEXT = {
    "exact": "exact",
    "whole": "runs in one piece: {reason}",
    "refused": "refused: {reason}",
    "absent": "not judged: {reason}",
    "failed": "**fails**: {reason}",
}
_MAX_REASON = 200


def line(judgement: Judgement) -> str:
    """Returns a row of the table."""
    result = _TEXT[judgement.state].format(reason=_short(judgement.reason))
    return f"| {judgement.family} | {_figures(judgement.outcome)} | {result} |"


def write(judgements: Iterable[Judgement], page: Path = PAGE) -> None:
    """Writes rows into the page. A row of the same libraries with more splits stays if the family is still exact."""
    text = page.read_text(encoding="utf-8")
    before, _, after = text.partition(TRANSFORMERS)
    known = rows(after) if versions() in after else {}
    for judgement in judgements:
        earlier = known.get(judgement.family, "")
        if judgement.state != "exact" or state_of(earlier) != "exact" or _splits(earlier) <= _splits(line(judgement)):
            known[judgement.family] = line(judgement)
    head = _HEAD.format(versions=versions(), summary=_summary([state_of(row) for row in known.values()]))
    table = "".join(known[name] + "\n" for name in sorted(known, key=str.lower))
    page.write_text(before + head + table, encoding="utf-8")


def rows(text: str) -> dict[str, str]:
    """Returns {family: its line}."""
    found = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("| ")}
    return {name: row for name, row in found.items() if name != "family" and "`" not in name}


def state_of(row: str) -> str:
    """Reads Judgement.state back from the last cell; "" for no row."""
    result = row.rstrip("| \n").rpartition(" | ")[2]
    return next((state for state, text in _TEXT.items() if row and result.startswith(text.partition("{")[0])), "")


def versions() -> str:
    """Returns the versions of the libraries in the table."""
    return ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in ("torch", "transformers"))


def _summary(states: list[str]) -> str:
    return (
        f"Of {len(states)} families, {states.count('exact')} are exact and can be split, {states.count('whole')} run "
        f"in one piece only,\n{states.count('refused')} are refused with a reason, {states.count('absent')} could not "
        f"be judged, and {states.count('failed')} fail."
    )


def _figures(outcome: Outcome | None) -> str:
    if outcome is None:
        return " | ".join([""] * 6)
    cuts = "all" if len(outcome.cuts) == NUM_LAYERS - 1 else ", ".join(map(str, outcome.cuts)) or "none"
    worst, together = (f"{value:.1e}" if value else "0" for value in (outcome.worst, outcome.rows))
    return " | ".join((cuts, str(outcome.splits), worst, together, ", ".join(outcome.kv), outcome.rollback))


def _splits(row: str) -> int:
    cells = row.split("|")
    return int(cells[3]) if len(cells) > 3 and cells[3].strip().isdigit() else 0


def _short(reason: str) -> str:
    """Shortens a text for a table cell, without names of temporary folders."""
    return re.sub(r"/[\w./\-]*tmp\w*/?", "", reason).replace("|", "/").replace("<", "")[:_MAX_REASON]
