"""A torch stage reads its own share of a checkpoint, and says what is wrong with a bad one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from exo_mesh_torch import provider
from exo_mesh_torch.kv import SLACK
from exo_mesh_torch.provider import find_compute

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import COUNTED_STATES, LoadRequest, ModelSurvey, StageEngine, StageInput
from exo_mesh.errors import InputError, ModelError
from exo_mesh.weights.card import read_card
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json
from tools.architectures.torch_families import NUM_LAYERS
from tools.architectures.torch_models import whole_model_logits, write_random_model
from tools.architectures.trials import computed
from tools.stages import Stages

SMALL = TinyModel(layers=4)


def load(
    model_dir: Path,
    start: int,
    stop: int,
    num_layers: int,
    progress: Any = lambda done, total: None,
    **options: str,
) -> StageEngine:
    stage = provider.create()
    shard = Shard("tiny", start, stop, num_layers)
    stage.load(LoadRequest(shard, model_dir, 512, {"threads": "1", **options}), progress)
    return stage


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 5), (5, 8), (0, 8)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_its_share_and_no_more(tmp_path: Path, start: int, stop: int, tied: bool) -> None:
    model = TinyModel(layers=8, hidden=128, vocab=2000, tied=tied, dtype="bfloat16", shards=3)
    card = read_card(write_checkpoint(tmp_path, model), "tiny")
    stage = load(tmp_path, start, stop, 8, dtype="bfloat16")
    share = card.shard_bytes(start, stop)
    assert share <= stage.memory_bytes() <= share + 4096
    stage.close()
    assert stage.memory_bytes() == 0


def test_a_file_that_shrinks_while_it_is_read_is_a_model_error(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, SMALL) / "model.safetensors"

    def shrink(done: int, total: int) -> None:
        os.truncate(file, 120_000)

    with pytest.raises(ModelError, match=r"model\.safetensors: model\.layers\..* cannot be read: the file ends"):
        load(tmp_path, 0, 4, 4, shrink)


def edit_config(model_dir: Path, **changes: Any) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config.update(changes)
    write_json(model_dir / "config.json", {key: value for key, value in config.items() if value is not None})


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    for name in ("configuration_evil", "modeling_evil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it ran')")
    auto_map = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit_config(tmp_path, auto_map=auto_map)
    load(tmp_path, 0, 2, 4).close()  # transformers has llama itself, and that is used
    edit_config(tmp_path, model_type="evil")
    with pytest.raises(ModelError, match=r"config\.json: auto_map asks to run code"):
        load(tmp_path, 0, 2, 4)


@pytest.mark.parametrize(
    "options", [{"dtype": "int3"}, {"threads": "many"}, {"device": "abacus"}, {"batching": "x"}, {"speed": "high"}]
)
def test_an_option_that_makes_no_sense_is_named(tmp_path: Path, options: dict[str, str]) -> None:
    write_checkpoint(tmp_path, SMALL)
    with pytest.raises(InputError) as caught:
        load(tmp_path, 0, 4, 4, **options)
    assert caught.value.param == next(iter(options))


def test_a_text_tower_is_loaded_out_of_a_larger_model(tmp_path: Path) -> None:
    """Names and nested config as in a checkpoint with an image tower, which is left alone."""
    write_random_model(tmp_path / "text", "gemma3_text")
    want = whole_model_logits(tmp_path / "text")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    file = (tmp_path / "text" / "model.safetensors").read_bytes()
    head_bytes = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + head_bytes])
    tower = {name.replace("model.", "language_model.model.", 1): entry for name, entry in header.items()}
    tower = {name.replace("lm_head.", "language_model.lm_head."): entry for name, entry in tower.items()}
    tower.pop("__metadata__", None)
    end = max(entry["data_offsets"][1] for entry in tower.values())
    tower["vision_tower.patch.weight"] = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
    raw = json.dumps(tower).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(raw).to_bytes(8, "little") + raw + file[8 + head_bytes :] + bytes(8)
    )
    write_json(tmp_path / "config.json", {"model_type": "gemma3", "text_config": text})
    stages = Stages(provider, tmp_path, NUM_LAYERS, threads="1")
    np.testing.assert_array_equal(computed(stages.ring((4,))), want)
    stages.close()


def test_activations_go_on_in_the_dtype_that_was_agreed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    stage = provider.create()
    request = LoadRequest(Shard("tiny", 0, 2, 4), tmp_path, 512, {"dtype": "float32"}, activation_dtype="bfloat16")
    stage.load(request, lambda done, total: None)
    stage.insert(1, 8)
    output = stage.forward(StageInput((Row(1, 0, 3),), (40, 41, 42), {}))
    assert (output.tensors["hidden"].dtype, output.tensors["hidden"].shape) == ("bfloat16", (3, 64))
    assert [(spec.name, spec.dtype, spec.item_shape) for spec in stage.capabilities.outputs] == [
        ("hidden", "bfloat16", (64,))
    ]
    stage.close()


def test_the_survey_knows_bytes_and_kinds_before_a_weight_is_read(tmp_path: Path) -> None:
    card = read_card(write_checkpoint(tmp_path / "llama", SMALL), "tiny")
    found = provider.survey(tmp_path / "llama", {})
    assert isinstance(found, ModelSurvey)
    assert found.legal_cuts == (1, 2, 3)
    assert found.layer_bytes == card.layer_bytes
    assert (found.embed_bytes, found.head_bytes) == (card.embed_bytes, card.head_bytes)
    assert found.kv_bytes_per_token == (card.kv_bytes_per_token,) * 4
    assert found.kv_fixed_bytes == (0,) * 4
    assert len(set(found.layer_kinds)) == 1


def test_the_survey_counts_the_dtype_of_the_options(tmp_path: Path) -> None:
    """A stage loaded with dtype=float32 over bfloat16 files takes twice their bytes, weights and KV alike."""
    write_checkpoint(tmp_path / "llama", SMALL)
    small, large = (provider.survey(tmp_path / "llama", {"dtype": name}) for name in ("bfloat16", "float32"))
    assert large.layer_bytes == tuple(2 * size for size in small.layer_bytes)
    assert large.kv_bytes_per_token == tuple(2 * size for size in small.kv_bytes_per_token)
    with pytest.raises(InputError, match='no option "speed"'):
        provider.survey(tmp_path / "llama", {"speed": "high"})


def test_the_survey_tells_windows_and_states_from_full_attention(tmp_path: Path) -> None:
    """A key or value has 2 heads of 8 float32; a window is of 16 positions, with room for drafts."""
    write_random_model(tmp_path / "gemma3_text", "gemma3_text")
    windowed = provider.survey(tmp_path / "gemma3_text", {})
    full = [i for i, size in enumerate(windowed.kv_bytes_per_token) if size]
    assert full == [5]
    assert windowed.kv_bytes_per_token[5] == 2 * 2 * 8 * 4
    assert windowed.kv_fixed_bytes[0] == (16 + SLACK) * 2 * 2 * 8 * 4
    assert windowed.layer_kinds[5] != windowed.layer_kinds[4] == windowed.layer_kinds[0]
    write_random_model(tmp_path / "lfm2", "lfm2")
    states = provider.survey(tmp_path / "lfm2", {})
    assert [size > 0 for size in states.kv_bytes_per_token] == [False, False, True, False, False, True, False, False]
    assert states.kv_fixed_bytes[0] == (1 + COUNTED_STATES) * 32 * 3 * 4


def test_architectures_are_the_causal_ones_of_transformers_and_some_encoders() -> None:
    assert all(provider.supports(name) for name in ("llama", "qwen3", "mistral", "deepseek_v3", "gpt2", "gemma3"))
    assert all(provider.supports(name) for name in ("bert", "xlm-roberta", "modernbert", "nomic_bert"))
    assert not any(provider.supports(name) for name in ("bart", "whisper", "vit", "rwkv", "", "../utils", "auto"))


@pytest.mark.parametrize(
    ("version", "libraries", "devices", "compute"),
    [
        ("2.13.0+cpu", (), ("nvidia0",), "cpu"),
        ("2.13.0+cu128", (), ("nvidia0", "null"), "cuda"),
        ("2.13.0+cu128", (), ("null",), "cpu"),
        ("2.13.0", ("libtorch_cuda.so",), ("nvidia0",), "cuda"),
        ("2.13.0", ("libtorch_cpu.so",), ("nvidia0",), "cpu"),
        ("2.13.0+rocm6.4", (), ("kfd", "dri"), "rocm"),
        ("2.13.0+rocm6.4", (), ("dri",), "cpu"),
        ("2.13.0+xpu", (), ("dri",), "xpu"),
        ("2.13.0+cu130", (), ("dxg",), "cuda"),
    ],
)
@pytest.mark.skipif(sys.platform == "darwin", reason="wheels for macOS have Metal")
def test_a_gpu_counts_only_if_the_wheel_and_the_machine_have_it(
    version: str, libraries: tuple[str, ...], devices: tuple[str, ...], compute: str
) -> None:
    found, reason = find_compute(version, libraries, devices)
    assert found == compute
    assert version in reason


def test_on_a_linux_cpu_torch_goes_before_mlx() -> None:
    mlx = pytest.importorskip("exo_mesh_mlx").provider.availability()
    ours = provider.availability()
    if sys.platform == "linux" and mlx.available and "cuda" not in mlx.reason:
        assert ours.preference > mlx.preference
    if sys.platform == "darwin" and mlx.available:
        assert ours.preference < mlx.preference


def test_threads_are_what_the_option_says(tmp_path: Path) -> None:
    load(write_checkpoint(tmp_path, SMALL), 0, 1, 4).close()
    assert torch.get_num_threads() == 1
