"""Writes docs/reference/architectures.md and architectures-llamacpp.md: a part for each engine, a row for each name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.architectures.outcome import Outcome

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"

_TEXTS = {
    "exact": "exact",
    "whole": "runs in one piece: {reason}",
    "refused": "refused: {reason}",
    "absent": "not tried: {reason}",
    "failed": "**fails**: {reason}",
}
_MAX_REASON = 200


@dataclass(frozen=True)
class Page:
    """The part of a page about one engine. text: what stands before the rows, from `heading` on; {summary} and
    {versions} are filled in. cells: the columns of a row between the cuts and the result."""

    file: str
    heading: str
    text: str
    libraries: tuple[str, ...]
    cells: Callable[[Outcome], Sequence[Any]]

    def render(self, outcomes: Iterable[Outcome], page: str = "", *, few: bool = False) -> str:
        """Returns a page with these rows. Rows of an earlier page are kept if they are of the same versions; few: also
        those of architectures that are as they were, because more splits were tried then, but for the rollback."""
        before, _, part = page.partition(self.heading)
        part, other, after = part.partition("\n## ")
        known = rows(part) if f"Versions: {self.versions}." in part else {}
        for outcome in outcomes:
            row, earlier = self.row(outcome), known.get(outcome.name, "")
            is_kept = few and outcome.state == state_of(earlier) == "exact"
            known[outcome.name] = self._with_rollback(earlier, row) if is_kept else row
        found = "".join(f"{known[name]}\n" for name in sorted(known, key=str.lower))
        head = self.text.format(summary=summary(map(state_of, known.values())), versions=self.versions)
        return f"{before}{self.heading}{head}{found}{other}{after}"

    def _with_rollback(self, earlier: str, row: str) -> str:
        """An earlier row with the rollback of a new one, if that says any."""
        header = next(line for line in self.text.splitlines() if line.startswith("| ")).split(" | ")
        cells, new = earlier.split(" | "), row.split(" | ")
        if "rollback" in header and (found := new[header.index("rollback")].strip()):
            cells[header.index("rollback")] = found
        return " | ".join(cells)

    def write(self, outcomes: Iterable[Outcome], *, few: bool) -> None:
        path = DOCS / self.file
        path.write_text(self.render(outcomes, self.read(), few=few), encoding="utf-8")

    def read(self) -> str:
        return (DOCS / self.file).read_text(encoding="utf-8")

    def states(self) -> dict[str, str]:
        """Returns {name: Outcome.state} as the page says."""
        return {name: state_of(row) for name, row in self.rows().items()}

    def rows(self) -> dict[str, str]:
        return rows(self.read().partition(self.heading)[2].partition("\n## ")[0])

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in self.libraries)

    def row(self, outcome: Outcome) -> str:
        result = _TEXTS[outcome.state].format(reason=_short(outcome.reason))
        cells = [ranges(outcome.cuts), *self.cells(outcome), result]
        return "| " + " | ".join([f"`{outcome.name}`", *map(str, cells)]) + " |"


def summary(states: Iterable[str]) -> str:
    """Returns a sentence with the counts of Outcome.state."""
    found = list(states)
    exact, whole, refused, absent, failed = (found.count(state) for state in _TEXTS)
    return (
        f"Of {len(found)} architectures, {exact} are exact and can be split, {whole} run in one piece only,\n"
        f"{refused} are refused with a reason, {absent} could not be tried, and {failed} fail."
    )


def rows(text: str) -> dict[str, str]:
    """Returns {name: its line}."""
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


def state_of(row: str) -> str:
    """Reads Outcome.state back from the last cell; "" for no row."""
    result = row.rstrip("| \n").rpartition(" | ")[2]
    return next((state for state, text in _TEXTS.items() if row and result.startswith(text.partition("{")[0])), "")


def ranges(numbers: Sequence[int]) -> str:
    """Formats numbers: 1, 2, 3, 5 -> 1–3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _short(reason: str) -> str:
    """Shortens a text for a table cell."""
    return reason.replace("|", "/").replace("<", "")[:_MAX_REASON]
