"""The table of versions: its floors are those of pyproject.toml, and one version is tried each day."""

from __future__ import annotations

import datetime

import pytest

from exo_mesh.engine.floors import is_older
from tools.versions import HEADING, PAGE, TESTS, UNTRIED, Trial, _rows, floors, table, try_version

PAGE_ROWS = [*_rows(PAGE.read_text(encoding="utf-8").partition(HEADING)[2])]


def test_the_page_has_the_oldest_and_the_newest_of_each_library() -> None:
    oldest = {row[0]: row[2] for row in PAGE_ROWS if row[1] == "oldest"}
    needed = floors()
    assert oldest.keys() == needed.keys(), "python -m tools.versions --write"
    assert not [name for name in needed if is_older(oldest[name], needed[name]) or is_older(needed[name], oldest[name])]
    assert {row[0] for row in PAGE_ROWS if row[1] == "newest"} == {*TESTS, *UNTRIED}
    assert all(row[4] or row[0] in UNTRIED for row in PAGE_ROWS), "each has the day on which it was tried"


def test_a_trial_replaces_its_row_and_no_other() -> None:
    before = table([Trial("grpcio", "1.76", "1.76.0", "passes"), Trial("grpcio", "newest", "1.85.1", "passes")], "")
    after = table([Trial("grpcio", "newest", "1.86.0", "fails: `tests/wire/test_a.py::b`")], before)
    rows = {(row[0], row[1]): row for row in _rows(after)}
    assert rows["grpcio", "oldest"][2:4] == ["1.76.0", "passes"]
    assert rows["grpcio", "newest"][2:4] == ["1.86.0", "fails: `tests/wire/test_a.py::b`"]
    assert rows["torch", "newest"][3] == UNTRIED["torch"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_todays_version_of_todays_library_passes() -> None:
    ends = [(library, wanted) for library in TESTS for wanted in (floors()[library], "newest")]
    library, wanted = ends[datetime.datetime.now(datetime.UTC).date().toordinal() % len(ends)]
    if library == "transformers":
        pytest.importorskip("torch", reason="the tests that use transformers need torch")
    trial = try_version(library, wanted)
    if trial.outcome.startswith("cannot be installed"):
        pytest.skip(trial.outcome)
    assert trial.is_good, trial
