"""A card says the type of the weights as their files have it, in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.api.ollama.describing import details_of
from exo_mesh.domain.model_settings import quantization_of
from exo_mesh.models.entry import ModelEntry
from exo_mesh.weights.card import read_card
from exo_mesh.weights.gguf import BLOCKS, num_bytes_of
from exo_mesh.weights.random_checkpoint import tokenizer_json
from tests.support.checkpoints import TinyModel, config_json, write_checkpoint, write_json
from tests.support.gguf_bytes import TEXT, U32, RawTensor, gguf_bytes, value
from tests.support.packed_checkpoints import FORMATS, save, write_packed

WIDTH = 256
NUMBERS = {name: number for number, (name, _, _) in BLOCKS.items()}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
FORMAT_WORDS = {
    "gptq-2": "gptq-2bit", "gptq-8": "gptq-8bit", "gptq": "gptq-4bit", "awq": "awq-4bit",
    "compressed-8": "compressed-tensors-8bit", "int8": "compressed-tensors-8bit",
    "compressed-4": "compressed-tensors-4bit", "fp8-rows": "compressed-tensors-fp8",
    "fp8-compressed": "compressed-tensors-fp8", "fp8": "fp8",
}  # fmt: skip
"""The word for each of FORMATS, by the beginning of its name."""


def tensor(name: str, shape: tuple[int, ...], dtype: str) -> RawTensor:
    return RawTensor(name, tuple(reversed(shape)), NUMBERS[dtype], bytes(num_bytes_of(dtype, shape)))


def gguf_of(directory: Path, dtype: str) -> Path:
    """A directory with a GGUF file of one layer whose matrices have one type; its norms and embedding are float32."""
    directory.mkdir()
    model = TinyModel(layers=1, hidden=WIDTH, intermediate=WIDTH, vocab=2)
    write_json(directory / "config.json", {**config_json(model), "quantization_config": {"quant_method": "gguf"}})
    write_json(directory / "tokenizer.json", tokenizer_json(model))
    square = (WIDTH, WIDTH)
    tensors = [tensor(f"blk.0.{name}.weight", square, dtype) for name in MATRICES]
    tensors += [tensor(f"blk.0.{name}.weight", (WIDTH,), "F32") for name in ("attn_norm", "ffn_norm")]
    tensors += [tensor("token_embd.weight", square, "F32"), tensor("output_norm.weight", (WIDTH,), "F32")]
    heads = {f"llama.attention.{key}": value(U32, 4) for key in ("head_count", "head_count_kv")}
    entries = {"general.architecture": value(TEXT, "llama"), **heads}
    (directory / "model.gguf").write_bytes(gguf_bytes(entries, tensors))
    return directory


@pytest.mark.parametrize("dtype", sorted(NUMBERS))
def test_a_gguf_file_has_the_type_of_its_matrices(tmp_path: Path, dtype: str) -> None:
    card = read_card(gguf_of(tmp_path / "model", dtype), "model")
    assert card.quantization == dtype
    details = details_of(ModelEntry("model", (), (), 10, (), quantization=card.quantization, dtype=card.dtype))
    assert (details.format, details.quantization_level) == ("gguf", dtype), "as Ollama shows it"


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_checkpoint_has_its_method_and_its_type(tmp_path: Path, name: str) -> None:
    packed, plain = write_packed(tmp_path, TinyModel(layers=1, hidden=128, intermediate=128), FORMATS[name])
    want = next(word for start, word in FORMAT_WORDS.items() if name.startswith(start))
    assert read_card(packed, "model").quantization == want
    assert read_card(plain, "model").quantization == ""


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "4bit"),
        ({"quantization": {"bits": 4, "group_size": 64, "mode": "affine"}}, "4bit"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "mxfp4"),
        ({"quantization": {"bits": 8, "group_size": 32, "mode": "mxfp8"}}, "mxfp8"),
        ({"text_config": {"quantization": {"bits": 4, "group_size": 16, "mode": "nvfp4"}}}, "nvfp4"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "bitnet"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt-nvfp4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "modelopt-fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}}, "modelopt-fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}}, "compressed-tensors-nvfp4"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
            "a": {"weights": {"num_bits": 4, "type": "float"}}}}}, "compressed-tensors-fp4"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
            "a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "gptq", "bits": True}}, "gptq"),
        ({"quantization": {"mode": "x" * 99, "bits": -1}}, None),
        ({"quantization": 4}, None),
    ],
)  # fmt: skip
def test_a_config_names_the_type_in_its_own_way(config: dict[str, Any], word: str | None) -> None:
    assert quantization_of(config) == word


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_weights_have_no_quantisation_and_ollama_gets_their_type(tmp_path: Path, dtype: str) -> None:
    card = read_card(write_checkpoint(tmp_path, TinyModel(layers=1, dtype=dtype)), "model")
    assert (card.quantization, card.dtype) == ("", dtype)
    entry = ModelEntry("m", (), (), 10, (), num_bytes=card.total_bytes, dtype=dtype)
    level = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    assert (details_of(entry).format, details_of(entry).quantization_level) == ("safetensors", level)
    assert details_of(entry).parameter_size.endswith("K"), "counted from the bytes"


@pytest.mark.parametrize(("stored", "word"), [("uint8", "fp8"), ("int8", "i8"), ("float16", "float16")])
def test_what_the_config_does_not_say_is_read_from_the_tensors(tmp_path: Path, stored: str, word: str) -> None:
    model = TinyModel(layers=1)
    directory = write_checkpoint(tmp_path, model)
    square, rng = (model.hidden, model.hidden), np.random.default_rng(1)
    tensors = {
        f"model.layers.0.self_attn.{name}_proj.weight": rng.integers(0, 9, square).astype(stored) for name in "qk"
    }
    tensors |= {f"model.layers.0.norm{number}.weight": np.ones(model.hidden, np.float32) for number in range(4)}
    save(
        {**tensors, "model.embed_tokens.weight": np.ones((model.vocab, 8), np.float32)}, directory / "model.safetensors"
    )
    card = read_card(directory, "model")
    assert (card.quantization, card.dtype) == (word, "float32")
