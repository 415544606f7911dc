"""Measuring the cost of a layer, of the head and of a forward pass, with a few real layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from exo_mesh_dummy import provider as dummy

from exo_mesh.engine.layer_speed import (
    MAX_LAYERS,
    SliceTimes,
    costs_of,
    lower_quartile,
    measure_speed,
    others_share,
    slices_to_time,
)
from exo_mesh.engine.registry import load_registry
from exo_mesh.errors import EngineError
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("speed"), TinyModel("llama", layers=4))


def test_the_slices_end_with_the_model_and_one_ends_before_it() -> None:
    assert slices_to_time(range(33), [10] * 32) == (range(24, 32), range(28, 32), range(27, 31))
    long, short, inner = slices_to_time(range(33), [200 * 2**20] * 32)
    assert (long, short, inner) == (range(30, 32), range(31, 32), range(30, 31)), "few layers of a large model"
    assert slices_to_time((0, 4, 8), [1, 1]) == (range(8), range(4, 8), range(4)), "cuts between several layers"
    assert slices_to_time((0, 6), [1]) == (range(6), range(6), range(6)), "a model that cannot be cut"


@pytest.mark.parametrize("num_layers", range(2, 20))
def test_no_slice_is_empty_or_too_long(num_layers: int) -> None:
    for layers in slices_to_time(range(num_layers + 1), [1] * num_layers):
        assert 0 < len(layers) <= MAX_LAYERS and layers.stop <= num_layers


def test_the_cost_of_layer_head_and_pass_follow_from_three_slices() -> None:
    def took(num_layers: int, head_s: float) -> SliceTimes:
        return SliceTimes(num_layers, 0.001 + 0.002 * num_layers + head_s, 1.0, 1.0)

    cost = costs_of(took(8, 0.004), took(4, 0.004), took(4, 0.0), "one_s")
    assert (cost.fixed_s, cost.layer_s, cost.head_s) == pytest.approx((0.001, 0.002, 0.004))


def test_noise_never_makes_layers_free() -> None:
    noisy = costs_of(SliceTimes(8, 0.01, 1, 1), SliceTimes(4, 0.03, 1, 1), SliceTimes(4, 0.02, 1, 1), "one_s")
    assert noisy.is_valid and noisy.layer_s == pytest.approx(0.7 * 0.02 / 4)
    whole = SliceTimes(6, 0.6, 1, 1)
    assert costs_of(whole, whole, whole, "one_s").layer_s == pytest.approx(0.1)


def test_a_quarter_of_the_passes_are_faster_than_the_one_that_counts() -> None:
    assert lower_quartile([5.0, 1.0, 3.0, 2.0, 4.0]) == 2.0
    assert lower_quartile([7.0]) == 7.0


def test_the_work_of_other_processes_counts_and_the_own_does_not() -> None:
    assert others_share(busy_s=14.0, own_s=4.0, elapsed_s=10.0, num_cores=2) == pytest.approx(0.5)
    assert others_share(busy_s=3.9, own_s=4.0, elapsed_s=10.0, num_cores=2) == 0.0, "clocks of different steps"


def test_an_engine_is_measured_with_a_few_layers(model_dir: Path) -> None:
    speed = measure_speed(load_registry().provider("numpy"), model_dir, {}, budget_s=0.2)
    assert speed.is_valid and 0 < speed.chunk_tokens <= 128


def test_an_engine_that_declares_no_inputs_cannot_be_measured(model_dir: Path) -> None:
    with pytest.raises(EngineError):
        measure_speed(dummy, model_dir, {"cost_ms": "0"}, budget_s=0.2)


@pytest.mark.extended
def test_the_child_prints_figures_or_an_error_without_paths(model_dir: Path) -> None:
    for engine, key in (("numpy", "speed"), ("unknown", "error")):
        command = [sys.executable, "-m", "exo_mesh.rings.runner.asking.layer_speed", engine, str(model_dir), "{}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        said = json.loads(done.stdout.splitlines()[-1])
        assert list(said) in ([key], ["disturbed"]) and done.returncode == (key == "error")
        assert str(model_dir) not in str(said)
