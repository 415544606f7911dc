"""`python -m tools.bench group` shows whether a group on this machine is right, and refuses what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import TinyModel, write_checkpoint
from tools.bench.__main__ import main
from tools.bench.group import measure


def test_a_group_of_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["group", "--ranks", "1"]) == 1
    assert "at least two ranks" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_tiny_group_is_right_and_all_its_figures_are_there(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    result = await measure(write_checkpoint(tmp_path, TinyModel("llama", layers=2, context=2048)), 2, 6, 5)
    assert result["correct"]
    assert result["stress"] | {"group_s": 0, "alone_s": 0} == {
        "requests": 6, "ended": 6, "same_tokens": 6, "group_s": 0, "alone_s": 0,
    }  # fmt: skip
    assert 0 < result["canary"]["worst"] < 1e-5
    assert min(result["all_reduce"].values()) > 0 and min(result["layer"].values()) > 0
    assert "better as" in result["verdict"]["reason"]
