"""The examples run; those of clients that are not installed here are checked without running."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import clean_environ

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = ROOT / "examples" / "clients"
EXAMPLES = sorted(path.name for path in CLIENTS.iterdir() if path.suffix in (".py", ".mjs", ".sh"))
COUNTED = ", ".join(str(number) for number in range(7, 21))
FIRST_RING_S = 60


@pytest.mark.extended
def test_the_first_ring_prints_its_answer_over_two_peers(tmp_path: Path) -> None:
    environ = {**clean_environ(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "engines")])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "first_ring.py")],
        env=environ, capture_output=True, text=True, timeout=FIRST_RING_S, check=False,
    )  # fmt: skip
    first, second, answer = done.stdout.splitlines()
    assert (done.returncode, answer) == (0, COUNTED), done.stderr
    assert first.endswith("holds the layers [0, 4]") and second.endswith("holds the layers [4, 8]")
    assert first.split()[1] != second.split()[1], "two peers hold them"


def test_the_first_ring_is_short_and_knows_no_http() -> None:
    text = (ROOT / "examples" / "first_ring.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 42
    assert not re.search(r"exo_mesh\.(api|cli)\b|aiohttp|urllib|http\.", text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_of_a_client_is_a_program_without_mistakes_of_syntax(name: str) -> None:
    text = (CLIENTS / name).read_text()
    if name.endswith(".py"):
        compile(text, name, "exec")
        return
    program = ["node", "--check"] if name.endswith(".mjs") else ["sh", "-n"]
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed")
    done = subprocess.run([*program, str(CLIENTS / name)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_says_how_to_install_its_client_and_how_to_call_it(name: str) -> None:
    head = "\n".join((CLIENTS / name).read_text().splitlines()[:3])
    assert f"{name} [URL MODEL]" in head
    assert name == "ask_curl.sh" or re.search(r"(pip|npm) install ", head)


def test_each_client_of_the_documentation_has_an_example_that_the_index_lists() -> None:
    page = (ROOT / "docs" / "tasks" / "clients.md").read_text()
    index = (ROOT / "examples" / "README.md").read_text()
    assert set(re.findall(r"\]\(clients/([\w.]+)\)", index)) == set(EXAMPLES)
    listed = re.findall(r"\]\(\.\./\.\./examples/clients/([\w.]+)\)", page)
    assert {*listed, "ask_curl.sh"} == set(EXAMPLES)
