"""Runs of extended or slow tests import no file that has none, and miss no test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import names_no_wanted_mark

TESTS = Path(__file__).parent
MARK = re.compile(r"pytest\.mark\.(extended|slow)\b")


@pytest.mark.parametrize(
    ("markexpr", "text", "is_left_out"),
    [
        ("extended and not slow", "def test_a(): ...", True),
        ("extended and not slow", "@pytest.mark.slow", True),
        ("extended and not slow", "@pytest.mark.extended", False),
        ("extended and not slow", "pytestmark = needs_chromium", False),
        ("slow", "@pytest.mark.extended", True),
        ("slow", "@pytest.mark.slow", False),
        ("extended or slow", "def test_a(): ...", False),
        ("not slow and not extended", "def test_a(): ...", False),
        ("", "def test_a(): ...", False),
    ],
)
def test_a_file_is_left_out_if_no_test_in_it_can_have_a_mark_that_is_asked_for(
    markexpr: str, text: str, is_left_out: bool
) -> None:
    assert names_no_wanted_mark(markexpr, text) is is_left_out


def test_a_mark_of_a_helper_is_given_to_whole_files() -> None:
    texts = {path: path.read_text("utf-8") for path in TESTS.rglob("*.py")}
    helpers = [text for path, text in texts.items() if not path.name.startswith("test_") and MARK.search(text)]
    assignments = [one for text in helpers for one in re.findall(r"^(\w+) = (.*?)(?=^\w|\Z)", text, re.M | re.S)]
    marks = [name for name, value in assignments if MARK.search(value)]
    assert len(marks) == len(helpers) > 0
    users = {path for path, text in texts.items() if re.search(rf"\b({'|'.join(marks)})\b", text)}
    assert all("pytestmark" in texts[path] for path in users if path.name.startswith("test_"))
