"""An MLX stage reads its own share of a checkpoint, and says what is wrong with a bad one."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx.nn as nn
from exo_mesh_mlx import provider

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import read_card
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json
from tests.support.ring import Ring

SMALL = TinyModel(layers=4)
SLACK = 1.15
"""A stage may take 15 % more than the bytes of its tensors."""


def load(
    model_dir: Path, start: int, stop: int, num_layers: int, progress: Any = lambda done, total: None
) -> StageEngine:
    stage = provider.create()
    stage.load(LoadRequest(Shard("tiny", start, stop, num_layers), model_dir, 512), progress)
    return stage


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def three_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyModel(layers=8, hidden=256, intermediate=512, vocab=4000, dtype="bfloat16", shards=3)
    return write_checkpoint(tmp_path_factory.mktemp("model"), replace(sizes, tied=request.param), repeat=True)


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 5), (5, 8), (0, 8)])
def test_a_stage_holds_its_share_and_no_more(three_files: Path, start: int, stop: int) -> None:
    card = read_card(three_files, "tiny")
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    stage = load(three_files, start, stop, 8)
    held = mx.get_active_memory() - before
    share = card.shard_bytes(start, stop)
    assert share <= held + 4096, "less than its tensors: something was not read"
    assert held <= share * SLACK
    stage.close()
    assert mx.get_active_memory() - before < 0.05 * share


def test_a_file_that_shrinks_after_it_was_opened_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exo_mesh_mlx import engine

    file = write_checkpoint(tmp_path, SMALL) / "model.safetensors"
    build = engine.build_stage

    def build_then_shrink(*args: Any) -> nn.Module:
        model = build(*args)
        os.truncate(file, 100_000)
        return model

    monkeypatch.setattr(engine, "build_stage", build_then_shrink)
    with pytest.raises(ModelError, match="layer 1 cannot be read"):
        load(tmp_path, 1, 4, 4)


@pytest.mark.skipif(util.find_spec("hf_olmo") is not None, reason="the library that this model file asks for is here")
def test_a_model_file_that_ends_the_process_is_refused_like_any_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    edit_config(tmp_path, model_type="olmo")
    with pytest.raises(ModelError, match=r'config\.json: model_type "olmo" is not supported'):
        load(tmp_path, 0, 2, 4)


def test_a_setting_that_is_missing_is_named_with_its_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyModel("qwen3", layers=4))
    edit_config(tmp_path, rms_norm_eps=None)
    with pytest.raises(ModelError, match=r"config\.json: .*rms_norm_eps"):
        load(tmp_path, 0, 2, 4)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    (tmp_path / "evil.py").write_text("raise SystemExit('pwned')")
    edit_config(tmp_path, model_file="evil.py")
    with pytest.raises(ModelError, match=r'config\.json: model_file names code "evil\.py"'):
        load(tmp_path, 0, 2, 4)


def test_architectures_are_those_of_mlx_lm_under_both_names() -> None:
    assert all(provider.supports(name) for name in ("llama", "qwen2", "qwen3", "mistral", "kimi_k2", "gemma3_text"))
    assert not any(provider.supports(name) for name in ("cache", "base", "rope_utils", "bert", "", "../utils"))


def edit_config(model_dir: Path, **changes: Any) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config.update(changes)
    write_json(model_dir / "config.json", {key: value for key, value in config.items() if value is not None})


def prompt_logits(model_dir: Path, cuts: tuple[int, ...]) -> np.ndarray:
    ring = Ring(provider, model_dir, 4, cuts)
    ring.insert(1)
    logits = ring.forward([Row(1, 0, 9, 9)], np.arange(40, 49, dtype=np.int32))
    ring.close()
    return logits


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_config_saved_by_transformers_5_means_the_same(tmp_path: Path, arch: str) -> None:
    write_checkpoint(tmp_path, TinyModel(arch, layers=4))
    edit_config(tmp_path, rope_theta=700.0)
    expected = prompt_logits(tmp_path, (2,))
    rope = {"rope_theta": 700.0, "rope_type": "default"}
    changes = {"rope_theta": None, "torch_dtype": None, "head_dim": None, "dtype": "float32", "rope_parameters": rope}
    edit_config(tmp_path, **changes)
    np.testing.assert_array_equal(prompt_logits(tmp_path, (2,)), expected)
