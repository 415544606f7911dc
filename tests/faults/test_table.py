"""The published table names tests that exist, all classes, and what was measured."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tools.faults.classes import CLASSES
from tools.faults.faults import Fault
from tools.faults.table import PAGE, between, class_table
from tools.faults.verdicts import misses, summary

TESTS = Path(__file__).resolve().parents[1]

RUN = {
    "fault": "runner KILL", "outcome": "stop", "detected_s": 0.1, "gap_s": 1.0, "warm_load_s": 0.6,
    "bytes_loaded": 6_000_000, "tokens_lost": 0,
}  # fmt: skip


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_class_is_there_and_every_test_that_is_named_exists() -> None:
    assert list(CLASSES) == [f"F{number}" for number in range(1, 27)]
    for name, one in CLASSES.items():
        assert one.tests or one.note, f"{name}: shown by nothing, and nobody says why"
        for test in one.tests:
            file, _, function = test.partition("::")
            assert function in functions(file), test


def test_the_page_has_a_row_for_every_class() -> None:
    text = PAGE.read_text()
    assert all(f"\n| {name} | {one.what} |" in text for name, one in CLASSES.items())
    assert all(f"`{test}`" in text for one in CLASSES.values() for test in one.tests)


def test_a_measured_row_stands_under_its_class() -> None:
    row = {"name": "F2", "fault": "it hangs", "detected_s": 5.0, "recovered_s": None, "bytes_loaded": 6_500_000,
           "tokens_lost": 0, "note": "as it should"}  # fmt: skip
    lines = class_table([row, {"name": "drawn"}, {**row, "detected_s": 6.0}])
    assert lines.index("| | → it hangs | 6.00 | | 6.5 MB | 0 | as it should |".replace("| |", "|  |", 1)
                       .replace("| | 6.5", "|  | 6.5")) == 4  # fmt: skip
    assert between("a\n<!-- x -->\nold\n<!-- end -->\nb", "x", ["new"]) == "a\n<!-- x -->\nnew\n<!-- end -->\nb"


def test_a_run_is_measured_against_its_bars() -> None:
    assert misses(RUN) == []
    assert "gap 5.1 s, bar 5 s" in misses({**RUN, "gap_s": 5.1})
    assert misses({**RUN, "gap_s": 1.4}) == ["1.3 s from the first sign to text, bar 1.2 s"]
    assert misses({**RUN, "gap_s": 1.4, "bytes_loaded": 0}) == [], (
        "nothing was loaded: there is nothing to compare with"
    )
    assert misses({**RUN, "outcome": "stage_lost", "tokens_lost": 7}) == ["stage_lost, 7 characters lost"]
    for fault in ("machine STOP", "one-way loss"):
        assert misses({**RUN, "fault": fault, "gap_s": 7.4}) == [], "the mesh must agree first, which takes its time"
        assert misses({**RUN, "fault": fault, "gap_s": 7.6}) == ["gap 7.6 s, bar 7.5 s"]
    assert misses({**RUN, "fault": "TCP reset", "gap_s": 9.0}) == [], "nothing is promised of it but the text"


def test_runs_are_summed_up_by_fault() -> None:
    lines = summary([RUN, {**RUN, "gap_s": 9.0, "detected_s": None}, {**RUN, "fault": Fault.RESET.value}])
    assert lines[2:] == [
        "| runner KILL | 2 | 0.10 (to 0.10) | 5.00 (to 9.00) | 6 MB | 0 | 5 s: 1 of 2 |",
        "| TCP reset | 1 | 0.10 (to 0.10) | 1.00 (to 1.00) | 6 MB | 0 | 1 of 1 |",
    ]
