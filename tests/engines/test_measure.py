"""Measuring engines: through the contract alone, in a process of its own, within a deadline."""

from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path

import numpy as np
import psutil
import pytest
from exo_mesh_dummy import provider as dummy

from exo_mesh.cli.bench.engines import EngineWork, measure_engine, parse_size
from exo_mesh.cli.bench.measuring import MeasuringChild, ask_once, engine_command
from exo_mesh.cli.bench.memory import SLACK, memory_table
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.bandwidth import bandwidth_of, cpu_bandwidth
from exo_mesh.engine.contract import TensorSpec
from exo_mesh.engine.measure import PREFILLS, ROWS, decode_bytes, made_up, measure_slice, open_loop, share_bytes
from exo_mesh.engine.registry import load_registry
from exo_mesh.errors import EngineError, InputError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.random_checkpoint import TinyModel, model_of_size, write_checkpoint
from tests.support.checkpoints import num_parameters
from tests.support.heavy import checkpoint_bytes, eight_layers
from tests.support.processes import run

REAL = sorted(
    name
    for name, provider in load_registry().providers.items()
    if provider.kind == "stage" and provider.availability().available and provider.availability().preference >= 0
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("measure"), TinyModel("llama", layers=4))


def test_a_slice_in_the_middle_is_timed_for_one_to_sixteen_rows(model_dir: Path) -> None:
    found = measure_slice(load_registry().provider("numpy"), model_dir, {}, budget_s=0.05)
    assert (found.stop - found.start, found.num_layers) == (1, 4)
    assert set(found.decode_s) == set(ROWS)
    assert min(found.decode_s.values()) > 0 < found.prefill_s
    assert found.prefill_tokens in PREFILLS
    assert found.bandwidth.bytes_per_s > 0


def test_an_engine_that_refuses_made_up_activations_is_timed_on_its_first_slice(model_dir: Path) -> None:
    """The dummy checks what it is handed, so nothing that a stage did not write gets past it."""
    found = measure_slice(dummy, model_dir, {"cost_ms": "2"}, budget_s=0.1)
    assert (found.start, found.stop) == (0, 1)
    assert found.decode_s[1] >= 0.002


def test_a_loop_over_the_contract_takes_what_its_steps_take(model_dir: Path) -> None:
    loop, engine = open_loop(dummy, model_dir, {"cost_ms": "3"})
    took = loop(range(20), 5)
    assert took.num_steps == 5
    assert took.prefill_s >= 0.003
    assert took.decode_s >= 5 * 0.003
    assert not engine.sequences()


def test_made_up_activations_have_the_shapes_and_dtypes_that_were_declared() -> None:
    specs = [TensorSpec(d, d, (8,)) for d in ("float32", "float16", "bfloat16", "int32", "uint8")]
    made = made_up(specs, 5, np.random.default_rng(0))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in made.items()} == {
        spec.name: (spec.dtype, (5, 8)) for spec in specs
    }
    halves = (made["bfloat16"].numpy().astype(np.uint32) << 16).view(np.float32)
    assert 0.5 < halves.std() < 2


def test_a_step_reads_all_but_the_embedding(tmp_path: Path) -> None:
    card = read_card(write_checkpoint(tmp_path, TinyModel("llama", layers=2, hidden=64, vocab=300)), "m")
    embedding, total = 300 * 64 * 4, num_parameters(TinyModel("llama", layers=2, hidden=64, vocab=300)) * 4
    assert decode_bytes(card, total) == total - embedding
    assert decode_bytes(card, 2 * total) == 2 * (total - embedding), "an engine that holds twice the bytes reads them"
    tied = read_card(write_checkpoint(tmp_path / "t", TinyModel("llama", layers=2, vocab=300, tied=True)), "m")
    assert decode_bytes(tied, 1000) == 1000


def test_a_share_is_that_of_the_files_where_an_engine_says_nothing(model_dir: Path) -> None:
    card = read_card(model_dir, "m")
    assert share_bytes(dummy, model_dir, Shard("m", 2, 4, 4), {}) == sum(card.layer_bytes[2:]) + card.head_bytes


def test_an_engine_with_a_device_of_its_own_says_its_bandwidth() -> None:
    class OnADevice:
        def memory_bandwidth(self) -> float:
            return 4.8e12

    assert bandwidth_of(OnADevice()).bytes_per_s == 4.8e12
    assert 0 < cpu_bandwidth(1, budget_s=0.05).bytes_per_s < 1e13


@pytest.mark.parametrize(("text", "parameters"), [("150M", 150_000_000), ("1.5b", 1_500_000_000), ("800k", 800_000)])
def test_sizes_are_written_as_people_do(text: str, parameters: int) -> None:
    assert parse_size(text) == parameters


@pytest.mark.parametrize("text", ["", "M", "150", "-1M", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_size(text)


def test_a_random_model_has_about_the_size_that_was_asked_for() -> None:
    for size in (20_000_000, 150_000_000, 1_500_000_000, 7_000_000_000):
        assert 0.9 * size < num_parameters(model_of_size(size)) < 1.1 * size
    with pytest.raises(InputError, match="between"):
        model_of_size(1000)


def test_a_child_says_why_it_cannot(model_dir: Path, tmp_path: Path) -> None:
    for engine, directory, why in (("nope", model_dir, 'no engine "nope"'), ("dummy", tmp_path, "config.json")):
        with pytest.raises(EngineError, match=why):
            ask_once(engine_command(engine, directory, {}, 30), 30)
    with pytest.raises(EngineError, match='no option "speed"'):
        ask_once(engine_command("dummy", model_dir, {"speed": "9"}, 30), 30)


@pytest.mark.extended
def test_a_child_takes_work_as_long_as_it_is_asked_and_refuses_nonsense(model_dir: Path) -> None:
    with MeasuringChild([*engine_command("dummy", model_dir, {}, 30), "--what", "engine"], 30) as child:
        assert child.read()["ready"]
        assert [child.ask("8 2")["num_steps"], child.ask("8 3")["num_steps"]] == [2, 3]
        with pytest.raises(EngineError, match="PROMPT STEPS"):
            child.ask("8 0")


def test_a_child_that_hangs_is_given_up_and_ended() -> None:
    with pytest.raises(EngineError, match="in time"), MeasuringChild([sys.executable, "-c", "input()"], 0.2) as child:
        process = psutil.Process(child.process.pid)
        child.read()
    assert not process.is_running()


def test_a_child_that_dies_leaves_its_last_words() -> None:
    with pytest.raises(EngineError, match="ValueError: no"):
        ask_once([sys.executable, "-c", "raise ValueError('no')"], 20)


@pytest.mark.extended
def test_the_command_prints_a_line_for_each_engine_and_says_why_not(tmp_path: Path) -> None:
    work = ["--random", "5M", "--prompt", "4", "--steps", "2", "--rounds", "1", "--engines", "dummy", "--json"]
    done = run(["bench", "engines", *work], tmp_path)
    ours, library = json.loads(done.stdout)["engines"]
    assert (ours["name"], ours["reason"]) == ("dummy", "")
    assert ours["decode_tokens_per_s"] > 0
    assert "no library loop to compare with" in library["reason"]
    refused = run(["bench", "engines", "--engines", "nope"], tmp_path)
    assert refused.returncode != 0 and 'no engine "nope"' in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("engine", REAL)
def test_an_engine_is_compared_with_the_loop_of_its_own_library(engine: str, tmp_path: Path) -> None:
    model_dir = write_checkpoint(tmp_path, model_of_size(20_000_000), repeat=True)
    lines = list(measure_engine(engine, model_dir, EngineWork(32, 8, 2, 300.0)))
    for line in lines:
        print(line)
    ours = lines[0]
    assert ours.decode_tokens_per_s and ours.of_bandwidth
    assert ours.ratio or util.find_spec(f"exo_mesh_{engine}.library_loop") is None


@pytest.mark.slow
@pytest.mark.parametrize("engine", REAL)
@pytest.mark.timeout(600)
def test_loading_a_stage_of_a_large_checkpoint_takes_its_share_of_memory(engine: str, tmp_path: Path) -> None:
    table = memory_table([engine], tmp_path, eight_layers(checkpoint_bytes(2.0)))  # half of it, as float32
    print(table.text())
    for row in table.rows:
        assert not row.reason
        assert row.peak_bytes - row.bare_bytes <= SLACK * row.share_bytes
