"""A NumPy stage reads its own share of a checkpoint, and says what is wrong with a bad one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exo_mesh_numpy import checkpoint, provider

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine, StageInput, Surveyor
from exo_mesh.errors import InputError, ModelError
from exo_mesh.weights.card import read_card
from tests.support.checkpoints import TinyModel, tensor_shapes, write_checkpoint, write_json, write_safetensors

SMALL = TinyModel(layers=4)
WEIGHT = "model.layers.2.mlp.up_proj.weight"


def load(
    model_dir: Path,
    start: int,
    stop: int,
    num_layers: int = 4,
    progress: Any = lambda done, total: None,
    options: Mapping[str, str] | None = None,
) -> StageEngine:
    stage = provider.create()
    stage.load(LoadRequest(Shard("tiny", start, stop, num_layers), model_dir, 512, options or {}), progress)
    return stage


def edit_config(model_dir: Path, **changes: Any) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    write_json(model_dir / "config.json", config | changes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_survey_tells_the_bytes_that_stages_hold(tmp_path: Path, arch: str, tied: bool) -> None:
    model = TinyModel(arch, layers=4, tied=tied, dtype="bfloat16")
    write_checkpoint(tmp_path, model)
    assert isinstance(provider, Surveyor)
    survey = provider.survey(tmp_path, {})
    assert survey.legal_cuts == (1, 2, 3)
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        stage = load(tmp_path, start, stop)
        held = sum(survey.layer_bytes[start:stop]) + (start == 0) * survey.embed_bytes + (stop == 4) * survey.head_bytes
        assert stage.memory_bytes() == held
        stage.close()


def test_a_survey_tells_the_bytes_that_a_position_takes(tmp_path: Path) -> None:
    survey = provider.survey(write_checkpoint(tmp_path, TinyModel("qwen3", layers=4, dtype="float16")), {})
    stage = load(tmp_path, 0, 3)
    bare = stage.memory_bytes()
    stage.insert(1, 64)
    stage.forward(StageInput((Row(1, 0, 64),), tuple(range(64)), {}))
    assert stage.memory_bytes() - bare == 64 * sum(survey.kv_bytes_per_token[:3])
    assert not any(survey.kv_fixed_bytes)


def test_a_tied_model_on_one_stage_holds_its_table_once(tmp_path: Path) -> None:
    card = read_card(write_checkpoint(tmp_path, TinyModel(layers=4, tied=True)), "tiny")
    assert load(tmp_path, 0, 4).memory_bytes() == card.total_bytes


Change = Callable[[dict[str, tuple[int, ...]]], Any]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda shapes: shapes.pop(WEIGHT), rf"no tensor {re.escape(WEIGHT)}"),
        (lambda shapes: shapes.update({"model.norm.weight": (3,)}), r"model\.norm\.weight has shape \[3\]"),
        (lambda shapes: shapes.update({"model.layers.1.self_attn.q_proj.bias": (64,)}), r"q_proj\.bias is not used"),
        (lambda shapes: shapes.update({"model.layers.0.self_attn.q_norm.weight": (16,)}), r"q_norm\.weight is not"),
        (lambda shapes: shapes.pop("lm_head.weight"), r"no tensor lm_head\.weight"),
    ],
    ids=["missing", "wrong-shape", "bias", "norm", "no-head"],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(tmp_path: Path, change: Change, says: str) -> None:
    write_checkpoint(tmp_path, SMALL)
    shapes = tensor_shapes(SMALL)
    change(shapes)
    write_safetensors(tmp_path / "model.safetensors", shapes, "float32", lambda name: np.ones(shapes[name], np.float32))
    with pytest.raises(ModelError, match=says) as caught:
        load(tmp_path, 0, 2)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ModelError, match=says):
        provider.survey(tmp_path, {})


def test_what_does_not_matter_may_be_there(tmp_path: Path) -> None:
    """Frequencies as old checkpoints have them, layers past the last one, and a head that a tied model does not use."""
    model = TinyModel(layers=4, tied=True)
    shapes = tensor_shapes(write(tmp_path, model))
    shapes["lm_head.weight"] = (model.vocab, model.hidden)
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (8,)
    shapes["model.layers.4.eh_proj.weight"] = (8, 8)
    values = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
    write_safetensors(tmp_path / "model.safetensors", shapes, "float32", values.__getitem__)
    load(tmp_path, 0, 4)


def write(directory: Path, model: TinyModel) -> TinyModel:
    write_checkpoint(directory, model)
    return model


def test_a_file_that_shrinks_after_its_header_was_read_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_checkpoint(tmp_path, SMALL) / "model.safetensors"
    read = checkpoint.read_tensor_table

    def read_then_shrink(model_dir: Path) -> Any:
        table = read(model_dir)
        os.truncate(file, 100_000)
        return table

    monkeypatch.setattr(checkpoint, "read_tensor_table", read_then_shrink)
    with pytest.raises(ModelError, match=r"model\.safetensors: model\.layers\.\d.* ends \d+ bytes too early"):
        load(tmp_path, 1, 4)


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, TinyModel(layers=4, dtype="bfloat16")) / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b'"BF16"', b'"I16" '))
    with pytest.raises(ModelError, match=r"is I16; the numpy engine reads F32, F16, BF16"):
        load(tmp_path, 0, 2)


@pytest.mark.parametrize("options", [{"mode": "quick"}, {"dtype": "float16"}, {"cores": "2"}, {"threads": "many"}])
def test_an_unknown_option_is_refused(tmp_path: Path, options: Mapping[str, str]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        load(write_checkpoint(tmp_path, SMALL), 0, 2, options=options)


def test_it_supports_the_families_whose_code_it_has() -> None:
    assert all(provider.supports(name) for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3"))
    assert not any(provider.supports(name) for name in ("qwen2_moe", "qwen3_next", "gemma3_text", "", "../llama"))


def test_auto_takes_it_before_the_dummy_and_after_any_other_engine() -> None:
    look = provider.availability()
    assert look.available and look.compute == "cpu"
    assert 0 <= look.preference < 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_widened_exactly(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    write_checkpoint(tmp_path, TinyModel(layers=4, dtype=dtype, shards=2))
    stage = load(tmp_path, 0, 4)
    weights = stage.weights  # type: ignore[attr-defined]
    found = {"model.embed_tokens.weight": weights.embedding, "lm_head.weight": weights.head}
    found["model.layers.3.mlp.down_proj.weight"] = weights.layers[3].down.weight
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in set(opened.keys()) & found.keys():
                expected = opened.get_tensor(name).to(torch.float32).numpy()
                np.testing.assert_array_equal(found.pop(name), expected)
    assert not found
