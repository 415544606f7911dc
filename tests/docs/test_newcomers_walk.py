"""A person who has read only the README finds the page for each first need in at most two clicks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs.test_pages_and_links import links

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MOST_LINES, MOST_COLUMNS = 110, 120
"""Two screens."""

NEEDS = {
    "add a second machine": "docs/start/several-machines.md",
    "use my own model": "docs/start/first-model.md",
    "close the mesh": "docs/tasks/security.md#a-closed-mesh-step-by-step",
    "it does not see the other node": "docs/tasks/troubleshooting.md#nodes-do-not-see-each-other",
    "it is slow": "docs/tasks/troubleshooting.md#it-is-slow",
    "upgrade": "docs/tasks/upgrade.md",
    "uninstall": "docs/tasks/uninstall.md",
}
"""The page of each need, with the heading where the page has several subjects."""


def clicks_from(start: Path, most: int) -> Mapping[str, int]:
    """By page, with and without a heading: the fewest clicks from the start, if they are not more than `most`."""
    found: dict[str, int] = {}
    border = {start}
    for count in range(1, most + 1):
        targets = [
            (page, anchor) for document in border if document.suffix == ".md" for page, anchor in links(document)
        ]
        for page, anchor in targets:
            if page.is_relative_to(ROOT):
                name = str(page.relative_to(ROOT))
                found.setdefault(name, count)
                found.setdefault(f"{name}#{anchor}", count)
        border = {page for page, _ in targets if page.is_file()}
    return found


@pytest.fixture(scope="module")
def clicks() -> Mapping[str, int]:
    return clicks_from(README, 2)


@pytest.mark.parametrize(("need", "page"), NEEDS.items(), ids=NEEDS)
def test_each_first_need_is_two_clicks_from_the_readme(need: str, page: str, clicks: Mapping[str, int]) -> None:
    assert clicks.get(page, 99) <= 2, f"{need}: {page}"


def test_the_index_of_all_documentation_is_one_click_away(clicks: Mapping[str, int]) -> None:
    assert clicks["docs/README.md"] == 1


def test_the_readme_is_two_screens_long() -> None:
    shown = re.sub(r"\]\([^)]*\)", "]", README.read_text()).splitlines()  # nobody sees the targets of links
    assert len(shown) <= MOST_LINES
    assert [line for line in shown if len(line) > MOST_COLUMNS] == []
