"""The benchmark of a real model gives the library's own server the same load, and measures predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.__main__ import main

pytest.importorskip("xllamacpp")

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


def test_one_node_a_ring_and_llama_server_get_the_same_load(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--streams", "1", "--requests", "2", "--tokens", "4", "--prompt", "8", "--rounds", "1"]
    assert main(["real-model", "--form", "file", *small, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == model_file.name.removesuffix(".gguf") and result["engine"] == "llamacpp"
    for key in ("runs", "one", "llama_server"):
        (run,) = result[key]
        assert (run["failed"], run["requests"], run["tokens"]) == (0, 2, 4) and run["tokens_per_s"] > 0
    assert result["runs"][0]["against_llama_server"] > 0


def test_predictions_do_not_depend_on_the_cut(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [("numpy", "file", "1 stage", {}), ("numpy", "copy", "2 stages", {})]
    cells += [("llamacpp", "file", cut, {}) for cut in ("1 stage", "3 stages")]
    monkeypatch.setattr("tools.bench.real_model.QUALITY", cells)
    monkeypatch.setattr("tools.bench.real_model.NUM_TOKENS", 60)
    assert main(["real-model", "--quality", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["engine"] for row in rows] == ["numpy", "numpy", "llamacpp", "llamacpp"]
    assert rows[1]["divergence"] == pytest.approx(0, abs=1e-6) and rows[1]["nearest"] == 1
    assert rows[2]["loss"] == rows[3]["loss"] and rows[2]["nearest"] == rows[3]["nearest"]
