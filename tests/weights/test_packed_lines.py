"""Weights of GPTQ, AWQ, compressed-tensors and FP8: their values, line by line, and clear refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from exo_mesh.errors import ModelError
from exo_mesh.weights.packed import lines as packed_lines
from exo_mesh.weights.packed.layouts import FLOAT8_E4M3
from exo_mesh.weights.packed.lines import PackedLines
from exo_mesh.weights.packed.tensors import PackedTensor, is_spare_bias, read_packed_table
from exo_mesh.weights.safetensors import TensorTable, read_tensor_table
from tests.support.checkpoints import TinyModel, write_json
from tests.support.packed_checkpoints import FORMATS, write_packed

MODEL = TinyModel(layers=1, hidden=128, intermediate=192)
NAMES = [f"model.layers.0.{part}.weight" for part in ("self_attn.k_proj", "mlp.down_proj")]


def table_of(directory: Path) -> TensorTable:
    file = directory / "config.json"
    return read_packed_table(file, json.loads(file.read_text()), read_tensor_table(directory))


def reader_of(directory: Path, name: str) -> PackedLines:
    info = table_of(directory)[name]
    assert isinstance(info, PackedTensor)
    return PackedLines(name, info)


@pytest.mark.parametrize("name", FORMATS)
def test_lines_have_the_values_that_the_tools_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whole, in parts that fill no word, and through windows of 64 lines."""
    monkeypatch.setattr(packed_lines, "WINDOW_BYTES", 1)
    packed, plain = write_packed(tmp_path, MODEL, FORMATS[name])
    want = load_file(plain / "model.safetensors")
    assert set(table_of(packed)) - {key for key in table_of(packed) if key.endswith(".bias")} == set(want)
    for tensor in NAMES:
        reader = reader_of(packed, tensor)
        rows = len(want[tensor])
        assert reader.info.shape == want[tensor].shape
        np.testing.assert_allclose(reader.read(0, rows), want[tensor], rtol=1e-6)
        parts = [reader.read(first, min(37, rows - first)) for first in range(0, rows, 37)]
        np.testing.assert_array_equal(np.concatenate(parts), reader.read(0, rows))
        np.testing.assert_array_equal(reader.read(rows - 3, 2), reader.read(0, rows)[-3:-1])


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("fp8")])
def test_codes_and_their_factors_give_the_values_in_the_order_of_columns(tmp_path: Path, name: str) -> None:
    packed, _ = write_packed(tmp_path, MODEL, FORMATS[name])
    for tensor in NAMES:
        reader = reader_of(packed, tensor)
        if name == "gptq-8" and reader.width % 128:
            assert reader.bits == 0, "its last group is shorter"
            continue
        codes, scales, biases = reader.read_codes(3, 10)
        assert codes.dtype == np.uint8 and codes.max() < 2**reader.bits
        grouped = codes.reshape(10, -1, reader.group_size) * scales[..., None].astype(np.float64)
        values = (grouped + biases[..., None]).reshape(10, -1)
        order = reader.column_order()
        assert (order is not None) == ("reordered" in name)
        want = reader.read(3, 10)
        np.testing.assert_allclose(values, want if order is None else want[:, order], atol=1e-5 * np.abs(want).max())


def test_scales_of_whole_rows_are_given_for_groups_of_a_usual_size(tmp_path: Path) -> None:
    packed, _ = write_packed(tmp_path, MODEL, FORMATS["compressed-8"])
    assert [reader_of(packed, name).group_size for name in NAMES] == [64, 64]


def test_patterns_and_scales_of_8_bit_floats_give_the_values(tmp_path: Path) -> None:
    packed, _ = write_packed(tmp_path, MODEL, FORMATS["fp8-odd-blocks"])
    reader = reader_of(packed, NAMES[0])
    assert (reader.bits, reader.float8_scales().shape) == (0, (2, 2))
    table = FLOAT8_E4M3[reader.float8_codes(50, 1)]
    np.testing.assert_allclose(table[0, 90] * reader.float8_scales()[1, 1], reader.read(50, 1)[0, 90], rtol=1e-6)


def test_a_bias_of_a_gptq_layer_may_be_spare(tmp_path: Path) -> None:
    table = table_of(write_packed(tmp_path, MODEL, FORMATS["gptq-4"])[0])
    assert is_spare_bias("model.layers.0.mlp.up_proj.bias", table)
    assert not is_spare_bias("model.layers.0.input_layernorm.bias", table)


def edited(tmp_path: Path, name: str, changes: dict[str, Any]) -> Path:
    packed, _ = write_packed(tmp_path, MODEL, FORMATS[name])
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= changes
    write_json(packed / "config.json", config)
    return packed


def weights(**own: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **own}}}}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gptq-4", {"bits": 3}, r"config\.json: quantization_config\.bits 3 is not supported; supported: 2, 4, 8"),
        ("gptq-4", {"checkpoint_format": "marlin"}, r'checkpoint_format "marlin"'),
        ("gptq-4", {"dynamic": {"+:.*mlp.*": {"bits": 8}}}, r"dynamic\.\+:\.\*mlp\.\*\.bits 8"),
        ("gptq-4", {"bits": 8}, r"scales is F16\[2, 128\]; gptq has .*\[1, 128\] there"),
        ("gptq-4", {"bits": 4.0}, r"bits 4\.0 is not supported"),
        ("gptq-4", {"dynamic": [1]}, r"dynamic \[1\] is not supported; supported: an object"),
        ("gptq-4", {"group_size": "64"}, r'group_size "64"'),
        ("awq", {"bits": 3}, r"bits 3"),
        ("compressed-4", {"config_groups": [1]}, r"config_groups \[1\]"),
        ("compressed-4", {"sparsity_config": "x"}, r'sparsity_config "x"'),
        ("awq", {"version": "gemv"}, r'version "gemv" is not supported; supported: gemm'),
        ("compressed-4", {"format": "marlin-24"}, r'format "marlin-24"'),
        ("compressed-4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format"),
        ("compressed-4", weights(num_bits=3), r'config_groups\.g\.weights "int3"'),
        ("compressed-4", weights(num_bits=4, type="float"), r'weights "float4"'),
        ("compressed-4", {"config_groups": {"g": {"targets": ["re:(a+)+b"], "weights": {"num_bits": 4}}}}, "nested"),
        ("compressed-4", {"config_groups": {"g": {"targets": ["a.b"], "weights": {"num_bits": 4}}}}, "no config group"),
        ("fp8-blocks", {"fmt": "e5m2"}, r'fmt "e5m2"'),
        ("fp8-blocks", {"weight_block_size": [64, 64, 64]}, "two numbers"),
        ("fp8-blocks", {"weight_block_size": [32, 32]}, r"the scales F32\[2, 1\] of .* do not fit"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path: Path, name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        table_of(edited(tmp_path, name, changes))


@pytest.mark.parametrize(
    ("name", "leaf"),
    [("gptq-4", "scales"), ("gptq-4", "qzeros"), ("awq", "scales"), ("compressed-4", "weight_scale"),
     ("fp8-blocks", "weight_scale_inv")],
)  # fmt: skip
def test_a_missing_part_of_a_weight_is_named(tmp_path: Path, name: str, leaf: str) -> None:
    packed, _ = write_packed(tmp_path, MODEL, FORMATS[name])
    file = packed / "config.json"
    table = read_tensor_table(packed)
    del table[f"model.layers.0.mlp.up_proj.{leaf}"]
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj\.(\w+ is missing|weight .* has no scales)"):
        read_packed_table(file, json.loads(file.read_text()), table)


@pytest.mark.parametrize(
    ("name", "leaf"), [("gptq-4", "qweight"), ("compressed-4", "weight_packed"), ("fp8-one", "weight")]
)
def test_an_empty_weight_is_named(tmp_path: Path, name: str, leaf: str) -> None:
    packed, _ = write_packed(tmp_path, MODEL, FORMATS[name])
    file = packed / "config.json"
    table = read_tensor_table(packed)
    empty = f"model.layers.0.mlp.up_proj.{leaf}"
    table[empty] = replace(table[empty], shape=(0, 8), stop=table[empty].start)
    with pytest.raises(ModelError, match=r"up_proj\.\w+ \[0, 8\] is empty"):
        read_packed_table(file, json.loads(file.read_text()), table)


@pytest.mark.parametrize("name", ["gptq-4", "awq", "compressed-4", "fp8-blocks"])
def test_a_file_that_ends_early_is_named(tmp_path: Path, name: str) -> None:
    packed, _ = write_packed(tmp_path, MODEL, FORMATS[name])
    reader = reader_of(packed, NAMES[0])
    os.truncate(packed / "model.safetensors", reader.info.start + 10)
    with pytest.raises(ModelError, match=r"model\.safetensors: .* cannot be read: the file ends"):
        reader.read(0, 10)
