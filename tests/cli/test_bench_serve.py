"""`exo-mesh bench serve`: what it refuses before it starts, and that its figures are of the load that was asked for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.bench.serve_report import NAMES, compare, plot, table
from exo_mesh.cli.main import main
from tests.support.checkpoints import TinyModel, write_checkpoint


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--grid", "32"], "--grid 32: must be"),
        (["--grid", "32x0"], "--grid 32x0"),
        (["--grid", ",".join(["1x1"] * 65)], "--grid 1x1"),
        (["--rate", "0"], "--rate 0: must be requests per second"),
        (["--rate", "1,fast"], "--rate 1,fast"),
        (["--streams", "0"], "--streams 0: must be whole numbers"),
        (["--random", "lots"], '"lots" is not a size'),
        (["--url", "http://x", "--against-one"], "--url measures a running mesh"),
        (["--url", "http://x", "--compare", "single"], "--url measures a running mesh"),
        (["--compare", "single,double"], "--compare single,double: must be some of single, group, ring"),
        (["--compare", "group", "--peers", "1"], "a group needs at least 2 peers"),
        (["--plot", "figure.gif"], "must end in .svg"),
        (["--plot", "/no/such/place/figure.svg"], "the directory does not exist"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *argv]) in (exit_codes.USAGE, exit_codes.FAILED)
    assert said in capsys.readouterr().err


@pytest.mark.extended
def test_each_cell_is_asked_with_its_lengths_at_each_number_of_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "models" / "tiny"
    write_checkpoint(model, TinyModel(layers=2, hidden=16, intermediate=32, context=512))
    argv = ["--peers", "1", "--engine", "dummy", "--model", str(model), "--grid", "8x4,40x6", "--streams", "3"]
    assert main(["bench", "serve", *argv, "--engine-option", "cost_ms=2", "--json"]) == exit_codes.OK
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["prompt"], run["tokens"], run["streams"]) for run in runs] == [(8, 4, 3), (40, 6, 3)]
    for run in runs:
        requests = 2 * run["streams"]
        assert (run["requests"], run["failed"]) == (requests, 0)
        assert run["tokens_per_s"] * run["wall_s"] == pytest.approx(requests * run["tokens"], rel=0.01)
        assert run["prompt_tokens_per_s"] * run["wall_s"] == pytest.approx(requests * run["prompt"], rel=0.01)
        ((busy,), (bubble,)) = run["busy"], run["bubble"]
        assert 0 < busy <= 1 and busy + bubble == pytest.approx(1)


@pytest.mark.slow
def test_single_group_and_ring_get_the_same_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "models" / "tiny"
    write_checkpoint(model, TinyModel(layers=2, hidden=16, intermediate=32, context=512))
    argv = ["--peers", "2", "--engine", "dummy", "--model", str(model), "--prompt", "8", "--tokens", "4", "--json"]
    compared = ["--compare", "single,group,ring", "--streams", "2", "--engine-option", "cost_ms=2"]
    assert main(["bench", "serve", *argv, *compared]) == exit_codes.OK
    result = json.loads(capsys.readouterr().out)
    ((ring,), (group,), (single,)) = (result[key] for key in ("runs", "group", "one"))
    for run in (ring, group, single):
        assert (run["streams"], run["requests"], run["failed"]) == (2, 4, 0)
        assert run["tokens_per_s"] * run["wall_s"] == pytest.approx(4 * 4, rel=0.01)
    assert [len(run["busy"]) for run in (ring, group, single)] == [2, 2, 1], "each rank tells of itself"
    assert ring["against_group"] == pytest.approx(ring["tokens_per_s"] / group["tokens_per_s"], abs=0.01)
    assert "all_reduce_share" not in ring


WITH_RIVAL = NAMES | {"other": "other.server"}


def figures(streams: int, tokens_per_s: float) -> dict[str, Any]:
    spread = {"p50": 0.1, "p99": 0.2}
    lengths = {"streams": streams, "prompt": 8, "tokens": 4, "failed": 0}
    return {
        **lengths,
        "tokens_per_s": tokens_per_s,
        "ttft_s": spread,
        "itl_s": spread,
        "busy": [0.75],
        "bubble": [0.25],
    }


def result() -> dict[str, Any]:
    made: dict[str, Any] = {"peers": 2, "model": "m", "cores": 2, "runs": [figures(1, 30.0), figures(2, 60.0)]}
    made["one"], made["other"] = [figures(1, 20.0), figures(2, 0.0)], [figures(1, 40.0), figures(2, 60.0)]
    compare(made, WITH_RIVAL)
    return made


def test_the_table_has_a_line_for_each_run_and_ratios_of_the_same_load() -> None:
    lines = table(result(), WITH_RIVAL).splitlines()
    assert len(lines) == 1 + 6
    assert "1.50 x one stage, 0.75 x other.server" in lines[1] and "25%" in lines[1]
    assert "x one stage" not in lines[2], "nothing came there to compare with"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib (extra `plot`) is not installed")
def test_the_picture_names_all_that_is_compared(tmp_path: Path) -> None:
    plot(result(), tmp_path / "figure.svg", WITH_RIVAL)
    drawn = (tmp_path / "figure.svg").read_text()
    assert drawn.count("<!-- ring, 8 x 4 -->") == drawn.count("<!-- other.server, 8 x 4 -->") == 1
