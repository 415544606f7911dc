"""The chat's pure parts, run in Node: versions, thinking, context, files, dates, names of languages."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.web.assets import FOLDER

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="runs the page's code in Node")

SCRIPT = Path(__file__).parent / "chat_parts.mjs"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(FOLDER / "app", folder / "app")
    (folder / "package.json").write_text('{"type": "module"}')
    shutil.copy(SCRIPT, folder)
    assert NODE is not None
    done = subprocess.run([NODE, SCRIPT.name], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_versions_are_a_tree_and_turning_shows_what_followed_each(found: dict[str, Any]) -> None:
    assert found["walk"] == [
        "q1 a1b",
        "q1 a1 q2b a3",
        "q1 a1 q2 a2b",
        "q1 a1 q2 a2",
        "q1 a1 q2 a2",  # there is none before
        "q1 a1 q2 a2b",
        "q1 a1b",
    ]
    assert found["places"] == [None, {"at": 1, "of": 2}]
    assert found["every"] == "a1 a1b a2 a2b a3 q1 q2 q2b"


def test_thinking_is_offered_only_as_the_model_list_says(found: dict[str, Any]) -> None:
    efforts = ["low", "medium", "high"]
    assert found["choices"] == [[], [], [], ["", "off", "on"], ["", "off", *efforts], ["", *efforts]]
    assert found["fields"] == [{}, {}, {"enable_thinking": False}, {"reasoning_effort": "high"}, {}]


def test_the_context_is_counted_by_the_last_answer_and_estimated_after_it(found: dict[str, Any]) -> None:
    exact, about = {"tokens": 100, "isExact": True}, {"tokens": 103, "isExact": False}
    assert found["tokens"] == [{"tokens": 0, "isExact": True}, exact, about]
    assert found["limits"] == [0, 9, 4]
    assert found["laps"] == [None, None, 3]


def test_files_are_sent_in_fences_that_they_cannot_end_and_only_text_is_taken(found: dict[str, Any]) -> None:
    assert found["sent"] == "a.md:\n````\nx\n```\ny\n````\n\nb.txt:\n```\nz\n```\n\nWhy?"
    assert found["decoded"] == ["Aü", "grün", None, None]


def test_conversations_are_grouped_by_calendar_days(found: dict[str, Any]) -> None:
    names = ["pinned", "today", "yesterday", "week", "month", "older"]
    assert found["dates"] == [[name, 2 if name == "today" else 1] for name in names]


def test_code_is_named_by_its_language(found: dict[str, Any]) -> None:
    assert [(one["grammar"], one["name"]) for one in found["names"]] == [
        ("python", "Python"), ("cpp", "C++"), ("xml", "HTML"), ("", ""), ("", ""), ("javascript", "JavaScript"),
        ("", "brainfuck"), ("rust", "Rust"),
    ]  # fmt: skip
