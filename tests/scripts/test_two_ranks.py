"""scripts/test_distributed_2node.py says PASS of a tensor group that works, and FAIL of what does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test_distributed_2node.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_two_ranks_on_this_machine_pass_every_check() -> None:
    pytest.importorskip("mlx_lm")
    ended = run("--all")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(lines) == 6 and all(line.startswith("PASS") for line in lines), ended.stdout


def test_a_mesh_that_does_not_answer_is_a_fail_with_the_reason() -> None:
    ended = run("--api-url", "http://127.0.0.1:9")
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[0].startswith("FAIL") and "127.0.0.1:9" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_model_that_does_not_exist_is_a_fail_and_leaves_nothing() -> None:
    ended = run("--model", "no-such-model")
    assert ended.returncode == 1 and "FAIL  the model is split over two ranks" in ended.stdout
    assert "no-such-model" in ended.stdout
