"""Tries a tenth of all installed architectures, another one each day, as docs/reference/architectures.md says."""

from __future__ import annotations

import datetime
import random
import re
import time
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "architectures.md"
BUDGET_S = 3.0
"""No family is begun after so long."""


def todays_tenth(names: Sequence[str]) -> list[str]:
    """Every name is in one tenth of ten days in a row; their order is another one each time."""
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    tenth = sorted(names)[day % 10 :: 10]
    random.Random(day).shuffle(tenth)
    return tenth


def test_the_page_has_every_causal_family_of_the_transformers_that_it_names_and_none_that_fails() -> None:
    part = PAGE.read_text(encoding="utf-8").partition("\n## Families of transformers\n")[2]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    results = {cells[0].split(" |")[0]: cells[-1] for cells in lines}
    assert not [name for name, result in results.items() if result.startswith("**fails**")]
    others = {name: result for name, result in results.items() if result != "exact"}
    assert all(len(result.partition(": ")[2]) > 10 for result in others.values()), others
    provider = pytest.importorskip("exo_mesh_torch.provider")
    version = re.search(r"transformers (\d[\d.]*\d)", part)
    assert version
    if find_spec("transformers") and version[1] == metadata.version("transformers"):
        assert set(results) == provider._causal_models()


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_a_tenth_of_mlx_lms_architectures_is_as_the_page_says() -> None:
    pytest.importorskip("mlx_lm")
    from tools.architectures.check import check
    from tools.architectures.configs import architectures
    from tools.architectures.table import state_of, versions

    page = PAGE.read_text(encoding="utf-8")
    expected = {line.split("`")[1]: state_of(line) for line in page.splitlines() if line.startswith("| `")}
    begin, tried = time.monotonic(), 0
    for name in todays_tenth(architectures()):
        if time.monotonic() - begin > BUDGET_S:
            break
        outcome = check(name, few=True)
        tried += 1
        assert outcome.state != "failed", (name, outcome.reason, outcome.different)
        if f"Versions: {versions()}." in page:
            assert outcome.state == expected[name], (name, outcome.reason)
    assert tried


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_a_tenth_of_transformers_families_is_as_the_page_says() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tools.torch_architectures.configs import causal_families
    from tools.torch_architectures.judge import judge
    from tools.torch_architectures.table import rows, state_of, versions

    page = PAGE.read_text(encoding="utf-8")
    begin, tried = time.monotonic(), 0
    for name in todays_tenth(causal_families()):
        if time.monotonic() - begin > BUDGET_S:
            break
        found = judge(name)
        tried += 1
        assert found.state != "failed", (name, found.reason)
        if f"Versions of the libraries: {versions()}." in page:
            assert found.state == state_of(rows(page)[name]), (name, found.reason)
    assert tried
