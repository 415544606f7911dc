"""The config that is made from the metadata of a GGUF file is that of the checkpoint, and what is missing is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import parse_gguf
from exo_mesh.weights.gguf_config import make_config
from exo_mesh.weights.gguf_table import checkpoint_table
from tests.support.gguf_bytes import ARRAY, BOOL, F32, I32, TEXT, U32, RawTensor, gguf_bytes, value

SIZES = {
    "embedding_length": value(U32, 64),
    "block_count": value(U32, 1),
    "attention.head_count": value(U32, 4),
    "attention.head_count_kv": value(U32, 2),
    "context_length": value(U32, 131072),
    "feed_forward_length": value(U32, 128),
    "attention.layer_norm_rms_epsilon": value(F32, 1e-5),
    "rope.freq_base": value(F32, 500000.0),
}


def tensor(name: str, *shape: int, values: Any = None) -> RawTensor:
    """Shape as NumPy's; zeros if there are no values."""
    data = np.zeros(shape, "<f4") if values is None else np.asarray(values, "<f4").reshape(shape)
    return RawTensor(name, shape[::-1], 0, data.tobytes())


def config_of(
    architecture: str = "llama", tensors: tuple[RawTensor, ...] = (), general: Any = None, **changes: Any
) -> dict[str, Any]:
    """The config of a file. changes: of keys of the architecture, with `__` for a dot; None removes a key."""
    keys = dict(SIZES) | {key.replace("__", "."): body for key, body in changes.items()}
    entries = {"general.architecture": value(TEXT, architecture), **(general or {})}
    entries |= {f"{architecture}.{key}": body for key, body in keys.items() if body is not None}
    raw = gguf_bytes(entries, [tensor("token_embd.weight", 32, 64), *tensors])
    header = parse_gguf(raw, Path("m/x.gguf"), len(raw))
    return make_config(header, header.table, lambda info: raw[info.start : info.stop])


def test_sizes_have_the_names_and_values_of_the_checkpoint() -> None:
    config = config_of()
    assert config["model_type"] == "llama" and config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 500000.0
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (64, 1, 16)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["vocab_size"], config["intermediate_size"], config["max_position_embeddings"]) == (32, 128, 131072)
    assert config["tie_word_embeddings"] is True and config["attention_bias"] is False
    assert "rope_scaling" not in config and config["torch_dtype"] == "float32"
    bias = (tensor("output.weight", 32, 64), tensor("blk.0.attn_q.bias", 64))
    assert config_of(tensors=bias)["tie_word_embeddings"] is False
    assert config_of(tensors=bias)["attention_bias"] is True


def test_experts_make_another_model() -> None:
    config = config_of(expert_count=value(U32, 8), expert_used_count=value(U32, 2))
    assert config["model_type"] == "mixtral" and config["num_local_experts"] == 8 and config["num_experts_per_tok"] == 2


def llama3_factors(theta: float, half: int, factor: float, original: int = 8192) -> list[float]:
    """The divisors that llama.cpp's converter writes."""
    found = []
    for index in range(half):
        wavelength = 2 * math.pi * theta ** (2 * index / (2 * half))
        if wavelength < original / 4:
            found.append(1.0)
        elif wavelength > original:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_in_its_divisors(factor: float) -> None:
    divisors = llama3_factors(500000.0, 8, factor)
    assert 1.0 in divisors and factor in divisors
    config = config_of(tensors=(tensor("rope_freqs.weight", 8, values=divisors),))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_are_used_as_they_are() -> None:
    divisors = llama3_factors(500000.0, 8, 8.0, original=4096)
    scaling = config_of(tensors=(tensor("rope_freqs.weight", 8, values=divisors),))["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    assert scaling["long_factor"] == scaling["short_factor"] == pytest.approx(divisors)


def test_the_two_sets_of_phi_3_are_told_apart() -> None:
    sets = (
        tensor("rope_factors_short.weight", 8, values=[1.0] * 8),
        tensor("rope_factors_long.weight", 8, values=[2.0] * 8),
    )
    config = config_of("phi3", sets, rope__scaling__original_context_length=value(U32, 4096))
    assert config["partial_rotary_factor"] == 1.0
    scaling = config["rope_scaling"]
    assert scaling["short_factor"] == [1.0] * 8 and scaling["long_factor"] == [2.0] * 8
    assert scaling["attention_factor"] == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert config["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("kind", "more", "found"),
    [
        ("none", {}, None),
        ("linear", {"rope__scaling__factor": value(F32, 4.0)}, {"rope_type": "linear", "factor": 4.0}),
        (
            "yarn",
            {"rope__scaling__factor": value(F32, 4.0), "rope__scaling__original_context_length": value(U32, 32768)},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_scaling_in_the_metadata_is_used(kind: str, more: dict[str, bytes], found: dict[str, Any] | None) -> None:
    assert config_of(rope__scaling__type=value(TEXT, kind), **more).get("rope_scaling") == found


def test_every_token_that_ends_a_turn_is_an_end() -> None:
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "b"]
    general = {
        "tokenizer.ggml.tokens": value(ARRAY, (TEXT, tokens)),
        "tokenizer.ggml.token_type": value(ARRAY, (I32, [1, 3, 3, 1, 1])),
        "tokenizer.ggml.eos_token_id": value(U32, 4),
        "tokenizer.ggml.bos_token_id": value(U32, 0),
        "tokenizer.ggml.padding_token_id": value(U32, 31999),
    }
    config = config_of(general=general)
    assert config["eos_token_id"] == [1, 2, 4], "a plain token with such a text is none"
    assert config["bos_token_id"] == 0 and config["pad_token_id"] is None


@pytest.mark.parametrize(
    ("architecture", "changes", "tensors", "says"),
    [
        ("../warp", {}, (), "which is not the name of an architecture"),
        ("lfm2", {"attention__head_count_kv": value(ARRAY, (TEXT, ["8"]))}, (), "holds texts instead of numbers"),
        ("lfm2", {"attention__head_count_kv": value(ARRAY, (I32, [8, -1]))}, (), "must be a size, or a list of sizes"),
        ("llama", {"embedding_length": None}, (), "llama.embedding_length is null"),
        ("llama", {"block_count": value(U32, 0)}, (), "llama.block_count is 0"),
        ("llama", {"block_count": value(BOOL, True)}, (), "llama.block_count is true"),
        ("llama", {"attention__head_count": value(ARRAY, (U32, [4, 4]))}, (), "llama.attention.head_count is "),
        ("llama", {"attention__layer_norm_rms_epsilon": value(F32, math.nan)}, (), "not a finite number"),
        ("llama", {"attention__layer_norm_rms_epsilon": None}, (), "layer_norm_rms_epsilon is null"),
        ("llama", {"attention__key_length": value(U32, 32)}, (), "the length of values is 16"),
        ("llama", {"rope__dimension_count": value(U32, 8)}, (), "rope.dimension_count is 8 of 16"),
        ("llama", {"rope__scaling__type": value(TEXT, "odd"), "rope__scaling__factor": value(F32, 2.0)}, (), '"odd"'),
        ("llama", {}, (tensor("rope_freqs.weight", 4),), r"rope_freqs.weight is F32\[4\], not F32\[8\]"),
        ("llama", {}, (tensor("rope_freqs.weight", 8),), "values that are not positive"),
        ("gemma2", {}, (), "gemma2.attention.sliding_window is null"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(
    architecture: str, changes: dict[str, Any], tensors: tuple[RawTensor, ...], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        config_of(architecture, tensors, **changes)


def test_another_family_has_what_planning_needs_and_its_own_names() -> None:
    config = config_of(
        "lfm2",
        block_count=value(U32, 3),
        nextn_predict_layers=value(U32, 1),
        attention__head_count_kv=value(ARRAY, (I32, [0, 8, 0])),
    )
    assert config["model_type"] == "lfm2" and config["num_hidden_layers"] == 2
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 8, 16)
    raw = gguf_bytes({"general.architecture": value(TEXT, "lfm2")}, [tensor("blk.0.shortconv.conv.weight", 3, 4)])
    header = parse_gguf(raw, Path("m/x.gguf"), len(raw))
    assert list(checkpoint_table(header, header.table)) == ["blk.0.shortconv.conv.weight"]


def test_a_tensor_without_a_place_is_named() -> None:
    entries = {"general.architecture": value(TEXT, "llama"), "llama.attention.head_count": value(U32, 4)}
    for name, says in (
        ("blk.0.odd.weight", "blk.0.odd.weight has no place in a model of llama"),
        ("blk.0.attn_q.weight", r"blk.0.attn_q.weight \[9, 8\] does not have the rows of 4 heads"),
    ):
        raw = gguf_bytes(entries, [tensor(name, 9, 8)])
        header = parse_gguf(raw, Path("m/x.gguf"), len(raw))
        with pytest.raises(ModelError, match=says):
            checkpoint_table(header, header.table)
