"""The torch engine computes the same with a GGUF file as with the checkpoint that the file was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
import torch
from exo_mesh_torch import int4, provider

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from exo_mesh.weights.card import read_card
from exo_mesh.weights.gguf_layout import make_texts
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.gguf_twin import write_gguf_twin
from tools.architectures.torch_families import NUM_LAYERS
from tools.architectures.torch_models import whole_model_logits, write_random_model
from tools.architectures.trials import computed

GEMMA = {"tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma": GEMMA,
    "gemma2": {**GEMMA, "query_pre_attn_scalar": 8},
    "gemma3_text": {**GEMMA, "query_pre_attn_scalar": 8},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "granite": {},
}
"""Changes of the tiny config of each family to what all known models have."""

KEYS = {
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.25, "logit_scale": 2.0},
}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def lay_out(directory: Path) -> Path:
    for name, text in make_texts(directory).items():
        (directory / name).write_bytes(text)
    return directory


def load(model_dir: Path, start: int, stop: int, num_layers: int = NUM_LAYERS, **options: str) -> StageEngine:
    stage = provider.create()
    shard = Shard("tiny", start, stop, num_layers)
    stage.load(LoadRequest(shard, model_dir, 512, {"threads": "1", **options}), lambda done, total: None)
    return stage


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_of_a_float_file_give_the_logits_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    changes = FAMILIES[family] | (GRANITE if family == "granite" else {})
    origin = write_random_model(tmp_path / "origin", family, **changes)
    (tmp_path / "twin").mkdir()
    write_gguf_twin(origin, tmp_path / "twin" / "tiny.gguf", extra=KEYS.get(family))
    directory = lay_out(tmp_path / "twin")
    cut = provider.survey(directory, {}).legal_cuts[2]
    got = computed([load(directory, 0, cut, dtype="float32"), load(directory, cut, NUM_LAYERS, dtype="float32")])
    want = whole_model_logits(origin)
    assert np.ptp(want) > 0.1
    assert float(np.abs(got - want).max()) < 2e-5 * max(1.0, float(np.abs(want).max()))


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_parameters_of_a_quantised_file_are_those_of_the_reference(tmp_path: Path, quantisation: str) -> None:
    origin = write_checkpoint(tmp_path / "origin", TinyModel(layers=3))
    (tmp_path / "twin").mkdir()
    write_gguf_twin(origin, tmp_path / "twin" / "tiny.gguf", quantisation)
    directory = lay_out(tmp_path / "twin")
    whole, twin = load(origin, 0, 3, 3, dtype="float32"), load(directory, 0, 3, 3, dtype="float32")
    kind = gguf.GGMLQuantizationType[quantisation]
    expected = dict(whole._model._opened.model.named_parameters())  # type: ignore[attr-defined]
    found = dict(twin._model._opened.model.named_parameters())  # type: ignore[attr-defined]
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        value = parameter.numpy()
        if value.ndim == 2:
            packed = value.astype(np.float16) if quantisation == "F16" else gguf.quantize(value, kind)
            value = gguf.dequantize(packed, kind).astype(np.float32)
        assert np.array_equal(value, found[name].numpy()), name


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_a_survey_has_the_bytes_that_a_stage_holds(tmp_path: Path, dtype: str, width: int) -> None:
    """The dtype is set, as without it the CPU of this machine decides."""
    origin = write_checkpoint(tmp_path / "origin", TinyModel(layers=3))
    (tmp_path / "twin").mkdir()
    write_gguf_twin(origin, tmp_path / "twin" / "tiny.gguf", "Q8_0")
    directory = lay_out(tmp_path / "twin")
    card, survey = read_card(directory, "tiny"), provider.survey(directory, {"dtype": dtype})
    assert card.dtype == json.loads((directory / "config.json").read_text())["torch_dtype"] == "bfloat16"
    norms = 2 * 64
    matrices = (card.layer_bytes[0] - 4 * norms) * 32 // 34
    assert survey.layer_bytes[0] == width * (matrices + norms)
    stage = load(directory, 1, 2, 3, dtype=dtype)
    assert survey.layer_bytes[1] <= stage.memory_bytes() <= survey.layer_bytes[1] + 4096


@pytest.mark.skipif(not int4.can_multiply(), reason="torch has no fast 4-bit kernel on this machine")
@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_0", "Q4_1"])
def test_weights_of_a_file_stay_codes(tmp_path: Path, quantisation: str) -> None:
    """In about the bytes of the file, with the numbers of the plain weights, also where rows of heads are reordered."""
    origin = write_checkpoint(tmp_path / "origin", TinyModel(layers=3, hidden=128, intermediate=256))
    (tmp_path / "twin").mkdir()
    write_gguf_twin(origin, tmp_path / "twin" / "tiny.gguf", quantisation)
    directory = lay_out(tmp_path / "twin")
    cut = [load(directory, 0, 1, 3, quantised="on", dtype="float32"), load(directory, 1, 3, 3, quantised="on")]
    survey = provider.survey(directory, {"quantised": "on"})
    card = read_card(directory, "tiny")
    assert survey.layer_bytes[0] <= 1.25 * card.layer_bytes[0]
    assert 0 <= cut[1].memory_bytes() - sum(survey.layer_bytes[1:]) - survey.head_bytes < 4096
    whole = [load(directory, 0, 3, 3, dtype="float32")]
    small = [load(directory, 0, 3, 3, dtype="float32", quantised="on")]
    rounded = [load(directory, 0, 3, 3, dtype="bfloat16")]
    want, got, near = (computed(stages) for stages in (whole, small, rounded))
    assert float(np.square(got - want).mean()) < 4 * float(np.square(near - want).mean())
    assert float(np.abs(got - want).max()) < 0.2 * float(np.std(want))
