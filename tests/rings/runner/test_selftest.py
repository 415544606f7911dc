"""What engines make of a few layers: the same inputs on every machine, and windows that a prompt crosses."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.domain.agreement import MAX_DIFFERENCE, AgreementVerdict, RangeReport, Report, compare
from exo_mesh.engine.registry import providers
from exo_mesh.rings.runner.asking.selftest import (
    MAX_VALUES,
    NUM_TOKENS,
    counted_values,
    parse_ranges,
    run,
    sample,
    token_ids,
)
from tests.support.checkpoints import TinyModel, config_json, write_checkpoint, write_json


def report(engine: str, answer: dict[str, Any]) -> Report:
    ranges = [
        RangeReport(
            *result["range"],
            {name: np.frombuffer(base64.b64decode(text), "<f4") for name, text in result["outputs"].items()},
            *(tuple((name, tuple(shape)) for name, _, shape in result[side]) for side in ("inputs", "given")),
        )
        for result in answer["results"]
    ]
    return Report(engine, answer["native_dtype"], tuple(ranges))


def made_by(engine: str, model_dir: Path, scratch: Path, ranges: str) -> Report:
    scratch.mkdir(exist_ok=True)
    return report(engine, run(engine, model_dir, scratch / model_dir.name, parse_ranges(ranges), {}))


def verdict(one: Report, other: Report) -> AgreementVerdict:
    return compare(one, other, {})


def test_inputs_are_the_same_on_every_machine() -> None:
    values = counted_values("0 hidden", (NUM_TOKENS, 64))
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:16] == "ee1eb97bbab81029"
    assert token_ids(300)[:4] == (287, 255, 38, 266)
    assert values.std() == pytest.approx(1, abs=0.05) and abs(values.mean()) < 0.05
    assert not np.array_equal(values, counted_values("1 hidden", (NUM_TOKENS, 64)))


def test_a_sample_is_bounded_and_sees_every_column() -> None:
    wide = np.arange(NUM_TOKENS * 8192, dtype=np.float32).reshape(NUM_TOKENS, 8192)
    taken = sample(wide)
    assert taken.size <= MAX_VALUES and len(set((taken % 8192).tolist())) == 8192
    assert np.array_equal(sample(wide[:2, :8]), wide[:2, :8].reshape(-1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "4 bits"])
def test_mlx_and_numpy_agree_in_float32_whatever_the_weights_are_in(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("mlx.core")
    if "numpy" not in providers():
        pytest.skip("engine numpy is not installed")
    native = "bfloat16" if dtype == "4 bits" else dtype
    model_dir = write_checkpoint(tmp_path / "model", TinyModel(arch="qwen2", layers=4, dtype=native))
    if dtype == "4 bits":
        from mlx_lm import convert

        convert(str(model_dir), str(tmp_path / "quantised"), quantize=True, q_group_size=32, q_bits=4)
        model_dir = tmp_path / "quantised"
    one = made_by("mlx", model_dir, tmp_path / "a", "0:1,1:2,3:4")
    other = made_by("numpy", model_dir, tmp_path / "b", "0:1,1:2,3:4")
    assert (one.native_dtype, other.native_dtype) == (native, "float32")
    assert [sorted(part.outputs) for part in one.ranges] == [["hidden"], ["hidden"], ["logits"]]
    found = verdict(one, other)
    assert not found.reason and 0 < found.difference < 1e-4


def test_a_model_that_differs_only_by_its_window_is_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    model = TinyModel(layers=2)
    reports = []
    for window in (256, None):
        model_dir = write_checkpoint(tmp_path / str(window), model)
        kinds = ["sliding_attention", "full_attention"] if window else ["full_attention"] * 2
        config = {**config_json(model), "sliding_window": window, "layer_types": kinds}
        write_json(model_dir / "config.json", config)
        reports.append(made_by("mlx", model_dir, tmp_path / "scratch", "0:1,1:2"))
    assert verdict(reports[0], reports[0]).difference == 0
    found = verdict(*reports)
    assert "in layer 0" in found.reason and found.difference > 10 * MAX_DIFFERENCE


def child(*argv: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "exo_mesh.rings.runner.asking.selftest", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1])


def test_an_engine_that_is_no_part_of_any_mixed_ring_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model_dir = write_checkpoint(tmp_path / "model", TinyModel(layers=2))
    (tmp_path / "scratch").mkdir()
    code, answer = child("dummy", str(model_dir), str(tmp_path / "scratch"), "1:2")
    assert code == 1 and "passes on uint32, not float32" in answer["error"]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_child_ends_with_the_node_that_asked(tmp_path: Path) -> None:
    program = "import sys, time; from exo_mesh.rings.runner.asking.lifeline import tie\n"
    program += "print(tie(sys.argv[1:]), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--tied", "x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline().strip() == "['x']"
    process.stdin.close()
    assert process.wait(10) == 3
    process.stdout.close()
