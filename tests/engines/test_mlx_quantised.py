"""Quantised checkpoints split bit for bit, whatever the format; settings that nobody knows are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx.nn as nn
from exo_mesh_mlx import provider
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from exo_mesh.domain.frame import Row
from exo_mesh.errors import ModelError
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.quantising import edit_config, quantise
from tests.support.ring import Ring

LAYERS = 3
MODEL = TinyModel("qwen3", layers=LAYERS, hidden=128, intermediate=256)
IDS = np.random.default_rng(2).integers(0, 299, 16).astype(np.int32)
CHUNKS = [(0, 8), (8, 5), (13, 1), (14, 1), (15, 1)]

FORMATS: dict[str, dict[str, Any]] = {
    **{f"affine-{bits}": {"group_size": 64, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "affine-4-groups-of-32": {"group_size": 32, "bits": 4},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
MIXED: dict[str, Any] = {
    "model.embed_tokens": {"group_size": 64, "bits": 8},
    "lm_head": {"group_size": 32, "bits": 6},
    "model.layers.0.mlp.down_proj": False,
    "model.layers.1.mlp.gate_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "model.layers.2.self_attn.q_proj": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "model.layers.2.self_attn.v_proj": {"group_size": 64, "bits": 3},
}


def whole_logits(model: Any) -> np.ndarray:
    cache = make_prompt_cache(model)
    return np.concatenate([np.array(model(mx.array(IDS[at : at + n])[None], cache=cache)[0]) for at, n in CHUNKS])


def split_logits(model_dir: Path, cuts: tuple[int, ...]) -> np.ndarray:
    ring = Ring(provider, model_dir, LAYERS, cuts)
    ring.insert(1)
    logits = [ring.forward([Row(1, at, n, n)], IDS[at : at + n]) for at, n in CHUNKS]
    ring.close()
    return np.concatenate(logits)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_splits_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = quantise(write_checkpoint(tmp_path, MODEL), **FORMATS[name])
    expected = whole_logits(model)
    assert any(isinstance(module, nn.QuantizedEmbedding) for module in model.modules()) and np.ptp(expected) > 0
    np.testing.assert_array_equal(split_logits(tmp_path, (1,)), expected)


def test_a_mixture_of_formats_splits_bit_for_bit_and_is_surveyed_exactly(tmp_path: Path) -> None:
    model = quantise(write_checkpoint(tmp_path, MODEL), lambda path: MIXED.get(path, True), **FORMATS["affine-4"])
    np.testing.assert_array_equal(split_logits(tmp_path, (1, 2)), whole_logits(model))
    survey = provider.survey(tmp_path, {})
    held = [sum(array.nbytes for _, array in tree_flatten(layer.parameters())) for layer in model.layers]
    assert survey.layer_bytes == tuple(held) and len(set(held)) == LAYERS
    assert len(set(survey.layer_kinds)) == LAYERS
    total = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert survey.embed_bytes + survey.head_bytes + sum(held) == total


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"quantization": {"group_size": 64, "bits": 7}},
            "quantization.bits is 7; affine supports 1, 2, 3, 4, 5, 6, 8",
        ),
        ({"quantization": {"group_size": 48, "bits": 4}}, "quantization.group_size is 48"),
        ({"quantization": {"bits": 4}}, "quantization.group_size is null"),
        ({"quantization": {"group_size": 64, "bits": 4, "mode": "ternary"}}, 'quantization.mode is "ternary"'),
        ({"quantization": {"group_size": 64, "bits": 4, "lm_head": {"bits": 9}}}, "quantization.lm_head.bits is 9"),
        ({"quantization": "4bit"}, 'quantization is "4bit"'),
        ({"quantization_config": {"quant_method": "exl2"}}, 'quantization_config.quant_method is "exl2"'),
        ({"quantization_config": {"quant_algo": "FP8"}}, "quantization_config.quant_method is null"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_quantisation_is_named_with_file_and_key(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    write_checkpoint(tmp_path, MODEL)
    edit_config(tmp_path, **changes)
    for ask in (lambda: provider.survey(tmp_path, {}), lambda: split_logits(tmp_path, (1,))):
        with pytest.raises(ModelError, match=re.escape(f"{tmp_path / 'config.json'}: {says}")):
            ask()
