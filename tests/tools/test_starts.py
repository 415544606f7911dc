"""Every tool under tools/ starts as its documentation says, and does its job on the smallest input."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import TinyModel, write_checkpoint
from tools.faults.mesh import why_not as why_no_addresses
from tools.faults.table import PAGE
from tools.page_pictures import FOLDER, PICTURES

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ROOT / "docs" / "reference" / "architectures.md"
LLAMACPP_ARCHITECTURES = ROOT / "docs" / "reference" / "architectures-llamacpp.md"

CHILDREN = {"tools.bench.copy_child", "tools.fuzz.targets.large", "tools.llama_server", "tools.tensor_groups.rank"}
"""Modules that a tool starts, and nobody else."""


def installed(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


needs_mlx, needs_torch = installed("mlx_lm"), installed("torch", "transformers", "safetensors")
needs_llamacpp = installed("xllamacpp")
needs_addresses = pytest.mark.skipif(bool(why_no_addresses()), reason=why_no_addresses())
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def start(module: str, *argv: str | Path, deadline_s: float = 100.0) -> str:
    """What a tool prints; it must exit with 0."""
    command = [sys.executable, "-m", module, *map(str, argv)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=deadline_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    model = TinyModel(layers=1, hidden=16, heads=2, kv_heads=2, intermediate=32, context=2048)
    return write_checkpoint(tmp_path / "tiny", model)


def test_every_tool_is_started_here() -> None:
    source = Path(__file__).read_text()
    files = [file for file in (ROOT / "tools").rglob("*.py") if 'if __name__ == "__main__":' in file.read_text()]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for file in files}
    assert len(modules) > 10
    assert sorted(module for module in modules - CHILDREN if f'start("{module}"' not in source) == []


def test_the_preflight_says_how_much_memory_there_is() -> None:
    assert start("tools.preflight", "--need-gb", "0.001").startswith("OK")


def test_the_page_of_settings_is_up_to_date() -> None:
    assert start("tools.settings_page", "--check") == ""


def test_the_versions_that_would_be_tried_are_listed() -> None:
    assert start("tools.versions", "--list", "grpcio", "mlx-lm=0.32.1").splitlines()[1:] == [
        "grpcio newest",
        "mlx-lm 0.32.1",
    ]


def test_the_structure_is_counted() -> None:
    assert "a node makes" in start("tools.structure")


@needs_mlx
@pytest.mark.extended
def test_architectures_checks_one_and_knows_how_many_cuts_it_has() -> None:
    assert start("tools.architectures", "mlx", "llama").startswith("llama  exact  5/5 cuts")


@needs_mlx
@pytest.mark.extended
def test_the_speed_of_an_mlx_stage_stands_beside_that_of_mlx_lm(tiny: Path) -> None:
    lines = start("tools.architectures.speed", "mlx", tiny, "--steps", "1", "--turns", "1").splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["mlx-lm generate_step", "bare loop over the model", "stage"]
    assert lines[3].startswith("stage to mlx-lm generate_step: prompt ")


@needs_torch
@pytest.mark.extended
def test_torch_families_are_checked_and_nothing_is_written_unasked() -> None:
    before = ARCHITECTURES.read_text()
    assert start("tools.architectures", "torch", "--few", "llama").startswith("llama  exact  7/7 cuts")
    assert ARCHITECTURES.read_text() == before


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_speed_of_a_torch_stage_stands_beside_that_of_transformers() -> None:
    few = ("--prompt", "8", "--steps", "2", "--turns", "1")
    shown = start("tools.architectures.speed", "torch", "--dtype", "float32", *few, deadline_s=500.0)
    assert shown.startswith("transformers ") and "stage, 8 rows" in shown


@needs_llamacpp
@pytest.mark.extended
def test_llamacpp_architectures_are_checked_and_nothing_is_written_unasked() -> None:
    before = LLAMACPP_ARCHITECTURES.read_text()
    assert start("tools.architectures", "llamacpp", "--few", "llama").split()[:2] == ["llama", "exact"]
    assert LLAMACPP_ARCHITECTURES.read_text() == before


@needs_llamacpp
@pytest.mark.extended
def test_the_tiny_model_of_an_architecture_is_the_one_that_the_engine_ships() -> None:
    from exo_mesh_llamacpp.canary_models import MODELS

    assert json.loads(start("tools.architectures.canaries", "llama")) == json.loads(MODELS.read_text())["llama"]


@needs_llamacpp
@pytest.mark.extended
def test_bench_measures_a_llamacpp_stage_beside_llamacpp() -> None:
    briefly = ("--sizes", "5M", "--quants", "q8_0", "--rows", "2", "--prompts", "16", "--turns", "1", "--json")
    cells = json.loads(start("tools.bench", "against-llama", *briefly))
    assert [cell["work"] for cell in cells] == ["rows 2", "prompt 16"]
    assert all(cell["cpu_ms"] > 0 and cell["llama_cpu_ms"] > 0 for cell in cells)


@needs_llamacpp
@pytest.mark.extended
def test_bench_measures_two_llamacpp_stages_on_a_core_each_beside_llamacpp() -> None:
    briefly = ("--size", "5M", "--streams", "2", "--prompt", "4", "--tokens", "4", "--turns", "1", "--json")
    (load,) = json.loads(start("tools.bench", "llama-ring", *briefly))
    assert load["streams"] == 2 and load["ring"] > 0 and load["whole"] > 0 and not load["rpc"]


@needs_llamacpp
@pytest.mark.extended
def test_bench_measures_what_loading_a_llamacpp_stage_costs() -> None:
    lines = json.loads(start("tools.bench", "llama-load", "--sizes", "5M", "--types", "q8_0", "--json"))
    assert len(lines) == 3
    assert all(line["peak_bytes"] > 0 and line["share_bytes"] > 10_000 and line["cpu_s"] > 0 for line in lines)


@needs_mlx
@pytest.mark.extended
def test_tensor_groups_compares_two_ranks_with_one_process() -> None:
    first, last = start("tools.tensor_groups", "llama").splitlines()
    assert json.loads(first)["architecture"] == "llama"
    assert last == "1 computed, 0 wrong"


@needs_mlx
@pytest.mark.extended
def test_bench_group_finds_a_tiny_group_right(tiny: Path) -> None:
    shown = json.loads(start("tools.bench", "group", "--model", tiny, "--requests", "1", "--tokens", "2", "--json"))
    assert shown["correct"] and shown["stress"]["ended"] == 1


@pytest.mark.extended
def test_bench_vectors_measures_texts_and_a_stream_beside_them() -> None:
    shown = start("tools.bench", "vectors", "--engine", "numpy", "--stages", "1", "--rounds", "1", "--tokens", "4")
    assert "calls of 256 texts of 4 tokens" in shown and "beside calls for vectors" in shown


@pytest.mark.extended
def test_bench_shared_measures_streams_over_one_prompt() -> None:
    briefly = ("--engine", "numpy", "--prompt", "300", "--streams", "4", "--steps", "1", "--rounds", "1")
    memory, index = map(json.loads, start("tools.bench", "shared", *briefly).splitlines())
    assert memory["copies"] < 2 and memory["ratio"] > 0
    assert index["lookup_us"] < 1e5


@needs_torch
def test_the_demo_model_is_trained_exported_and_evaluated(tmp_path: Path) -> None:
    checkpoint, model = tmp_path / "checkpoint.pt", tmp_path / "model"
    briefly = ("--millions", "0.0001", "--tokens", "50", "--threads", "1", "--size", "1")
    assert "step " in start("tools.demo_model.train", *briefly, "--out", checkpoint)
    assert "tokens" in start("tools.demo_model.export", "--checkpoint", checkpoint, "--target", model)
    assert {file.name for file in model.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert start("tools.demo_model.evaluate", "--model", model, "--size", "1", "--card").startswith("count ")
    assert "% of 1 |" in (model / "README.md").read_text()


def test_a_mesh_of_three_is_simulated() -> None:
    head, row = start("tools.simulate", "mesh", "--peers", "3", "--brief").splitlines()
    assert head.split()[:3] == ["peers", "seed", "join_s"] and row.split()[:2] == ["3", "1"]


@pytest.mark.extended
def test_one_schedule_of_ballots_is_played() -> None:
    assert start("tools.simulate", "ballots", "--schedules", "1", "--jobs", "1").startswith("1 schedules, ")


def test_two_histories_of_the_router_are_played() -> None:
    assert start("tools.simulate", "router", "--histories", "2", "--jobs", "1").startswith("2 histories, ")


@needs_proc
def test_the_overhead_of_control_calls_is_measured() -> None:
    assert " bytes per call, " in start("tools.simulate.measure_overhead", "5")


def test_records_of_faults_are_written_into_a_page(tmp_path: Path) -> None:
    page, records = tmp_path / "faults.md", tmp_path / "faults.jsonl"
    shutil.copy(PAGE, page)
    row = {"name": "F2", "fault": "one of a test", "detected_s": 5.0, "recovered_s": None, "bytes_loaded": None}
    records.write_text(json.dumps(row | {"tokens_lost": 0, "note": ""}))
    start("tools.faults", "table", records, "--page", page)
    assert "→ one of a test | 5.00 |" in page.read_text()


@needs_addresses
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("work", [("drawn", "--runs", "1"), ("soak", "--minutes", "0.02")], ids=lambda work: work[0])
def test_faults_strike_a_real_mesh_and_are_recorded(work: tuple[str, ...], tmp_path: Path) -> None:
    start("tools.faults", "--record", tmp_path / "faults.jsonl", *work, deadline_s=500.0)
    (recorded,) = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    assert recorded["name"] == work[0]


@installed("grpc_tools")
def test_the_generated_code_is_up_to_date() -> None:
    assert start("tools.generate_protos", "--check") == "generated code is up to date\n"


@pytest.mark.parametrize("what", ["nginx", "units"])
def test_what_is_checked_in_is_up_to_date(what: str) -> None:
    shown = start("tools.write_nginx", "--check") if what == "nginx" else start("tools.systemd_units", "--check")
    assert shown == ""


@pytest.mark.extended
def test_the_cost_of_power_readings_is_measured() -> None:
    assert "loop" in start("tools.power_cost", "--recorded")


@installed("grafana_foundation_sdk")
def test_the_dashboards_are_up_to_date() -> None:
    assert start("tools.dashboards", "--check") == ""


@pytest.mark.extended
def test_the_demo_is_recorded(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    assert start("tools.record_demo", "--to", picture, "--engine", "numpy").endswith(f"{picture} is written\n")
    assert all(word in picture.read_text() for word in ("exo-mesh-demo&#160;over&#160;2&#160;peers", "peer-2", "20"))


def test_the_recorded_demo_is_the_demo_and_loads_nothing() -> None:
    shown = (ROOT / "docs" / "images" / "demo.svg").read_text()
    text = " ".join(re.findall(r">([^<]+)</text>", shown)).replace("&#160;", " ")
    for part in (
        "$ exo-mesh demo",
        "exo-mesh-demo over 2 peers",
        "peer-1",
        "peer-2",
        "Count from 7 to 20.",
        "tokens/s",
    ):
        assert part in text, part
    assert not re.search(r"url\((?!#)|href", shown)


@pytest.mark.extended
def test_fuzz() -> None:
    shown = start("tools.fuzz", "--count", "500", "--settle-s", "1", "generate")
    assert "500 messages" in shown and " 0 failed" in shown


@pytest.mark.extended
@installed("playwright")
@pytest.mark.skipif(shutil.which("chromium") is None, reason="not installed: chromium")
def test_the_pictures_of_the_page_that_the_documentation_has_are_taken(tmp_path: Path) -> None:
    start("tools.page_pictures", "--folder", tmp_path, deadline_s=240)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {f"{name}.webp" for name, *_ in PICTURES} == {path.name for path in FOLDER.glob("*.webp")}
