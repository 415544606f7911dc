"""Tries a tenth of all installed architectures, another one each day, as docs/reference/architectures.md says."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
from exo_mesh_torch.families import TEXT_OF_FAMILIES

from tools.architectures.check import adapter_of, check
from tools.architectures.llamacpp_configs import ARCHITECTURES
from tools.architectures.pages import PAGES
from tools.architectures.table import summary

BUDGET_S = 3.0
"""No family is begun after so long."""


def todays_tenth(names: Sequence[str]) -> list[str]:
    """Every name is in one tenth of ten days in a row; their order is another one each time."""
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    tenth = sorted(names)[day % 10 :: 10]
    random.Random(day).shuffle(tenth)
    return tenth


def is_page_right(engine: str) -> bool:
    """Checks today's families. Whether the page says of the same libraries what was found, and none fails."""
    page = PAGES[engine]
    says = page.states() if page.versions in page.read() else {}
    begin, found = time.monotonic(), {}
    for name in todays_tenth(adapter_of(engine).names()):
        if time.monotonic() - begin > BUDGET_S:
            break
        found[name] = check(engine, name, few=True)
    assert not [outcome for outcome in found.values() if outcome.state == "failed"]
    assert not says or {name: one.state for name, one in found.items()} == {name: says[name] for name in found}
    return bool(found)


@pytest.mark.parametrize("engine", PAGES)
def test_a_page_gives_a_reason_for_what_is_not_exact_and_nothing_fails(engine: str) -> None:
    states = PAGES[engine].states()
    assert "failed" not in states.values() and len(states) > 100
    cells = {name: row.rstrip(" |").split(" | ")[-1] for name, row in PAGES[engine].rows().items()}
    assert all(len(cells[name].partition(": ")[2]) > 10 for name, state in states.items() if state != "exact")
    assert summary(states.values()) in PAGES[engine].read()


def test_the_pages_have_every_architecture_of_the_libraries_that_they_name() -> None:
    assert set(PAGES["llamacpp"].states()) == set(ARCHITECTURES)
    provider = pytest.importorskip("exo_mesh_torch.provider")
    has_both = find_spec("torch") and find_spec("transformers")
    if has_both and PAGES["torch"].versions in PAGES["torch"].read():
        assert set(PAGES["torch"].states()) == provider._causal_models() | TEXT_OF_FAMILIES


@pytest.mark.extended
@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ["torch", "mlx"])
def test_a_tenth_of_all_architectures_is_as_the_page_says(engine: str) -> None:
    for module in {"torch": ("torch", "transformers"), "mlx": ("mlx_lm",)}[engine]:
        pytest.importorskip(module)
    assert is_page_right(engine)
