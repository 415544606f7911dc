"""MLX's quantised checkpoints on torch: the bits of mx.dequantize, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx_lm")

import mlx.core as mx
import torch
from exo_mesh_mlx.model_config import model_classes
from exo_mesh_torch import provider
from exo_mesh_torch.quantised import TorchPacking, dequantise, unpack
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from exo_mesh.domain.frame import Row
from exo_mesh.errors import ModelError
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json
from tests.support.quantising import edit_config, quantise
from tests.support.ring import Ring
from tools.architectures.torch_models import write_random_model

IDS = np.arange(40, 49, dtype=np.int32)
FLOATS = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def to_torch(array: mx.array) -> Any:
    """The same bits; uint32 words as bytes."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16))).view(torch.bfloat16)
    values = torch.from_numpy(np.array(array))
    return values.view(torch.uint8).reshape(values.shape[0], -1) if array.dtype == mx.uint32 else values


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine_weights_have_the_bits_of_mlx(bits: int, dtype: str) -> None:
    mx.random.seed(bits)
    for group_size in (32, 64, 128):
        packed = mx.quantize(mx.random.normal((48, 384)).astype(FLOATS[dtype]), group_size=group_size, bits=bits)
        want = to_torch(mx.dequantize(*packed, group_size=group_size, bits=bits))
        words, scales, biases = map(to_torch, packed)
        got = dequantise(words, scales, biases, TorchPacking("affine", bits, group_size))
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_weights_of_small_floats_have_the_bits_of_mlx(mode: str, bits: int, group_size: int) -> None:
    mx.random.seed(7)
    weights = mx.random.normal((48, 384)) * mx.exp(4 * mx.random.normal((48, 1)))  # scales far apart
    packed = mx.quantize(weights, mode=mode)
    words, scales = map(to_torch, packed)
    got = dequantise(words, scales, None, TorchPacking(mode, bits, group_size))
    assert torch.equal(got, to_torch(mx.dequantize(*packed, mode=mode)))


def test_three_bits_lie_in_one_stream() -> None:
    codes = [5, 0, 7, 1, 6, 2, 4, 3]
    stream = sum(code << (3 * i) for i, code in enumerate(codes))
    words = torch.tensor(list(stream.to_bytes(3, "little")), dtype=torch.uint8)
    assert unpack(words, 3).tolist() == codes


def quantised(directory: Path, **how: Any) -> None:
    """Packs weights in groups of 32, 4 bits; layer 1's MLP in 8 bits."""
    settings = {"group_size": 32, "bits": 4, **how}
    own = {"group_size": 32, "bits": 8} if "mode" not in how else settings
    quantise(directory, lambda path: own if "layers.1.mlp.down" in path else True, **settings)


def dequantised_copy(source: Path, target: Path) -> Path:
    """The same model with plain weights, by mx.dequantize alone."""
    config = json.loads((source / "config.json").read_text())
    quantisation = config.pop("quantization")
    config.pop("quantization_config")
    tensors = mx.load(str(source / "model.safetensors"))
    assert isinstance(tensors, dict)
    plain = {}
    for name, array in tensors.items():
        module = name.rpartition(".")[0]
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in tensors:
            how = quantisation.get(module, quantisation)
            how = quantisation if how is True else how
            parts = {key: tensors[f"{module}.{key}"] for key in ("scales", "biases") if f"{module}.{key}" in tensors}
            how = {key: how[key] for key in ("group_size", "bits", "mode") if key in how}
            array = mx.dequantize(array, **parts, **how)
        plain[name] = array
    target.mkdir()
    write_json(target / "config.json", config)
    mx.save_safetensors(str(target / "model.safetensors"), plain)
    return target


def prompt_logits(directory: Path, cuts: tuple[int, ...], num_layers: int) -> np.ndarray:
    ring = Ring(provider, directory, num_layers, cuts, dtype="float32", threads="1")
    ring.insert(1)
    logits = ring.forward([Row(1, 0, len(IDS), len(IDS))], IDS)
    ring.close()
    return logits


@pytest.mark.parametrize("how", [{"bits": 4}, {"bits": 3}, {"mode": "mxfp4"}], ids=str)
def test_a_quantised_checkpoint_is_the_dequantised_one(tmp_path: Path, how: dict[str, Any]) -> None:
    packed = write_checkpoint(tmp_path / "packed", TinyModel("qwen3", layers=4, tied=True))
    quantised(packed, **how)
    plain = dequantised_copy(packed, tmp_path / "plain")
    got = prompt_logits(packed, (1, 3), 4)
    np.testing.assert_array_equal(got, prompt_logits(plain, (), 4))
    assert np.ptp(got) > 0.1


def test_stacked_experts_of_mlx_are_taken_apart(tmp_path: Path) -> None:
    """mlx-lm stacks a layer's experts under names of its own; here they are quantised besides."""
    plain = write_random_model(tmp_path, "qwen3_moe")
    want = prompt_logits(plain, (), 8)
    model, _ = load_model(plain, get_model_classes=model_classes)
    tensors = dict(tree_flatten(model.parameters()))
    assert any("switch_mlp" in name for name in tensors)
    mx.save_safetensors(str(plain / "model.safetensors"), tensors)
    np.testing.assert_array_equal(prompt_logits(plain, (3,), 8), want)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization": {"group_size": 32, "bits": 7}}, r"config\.json: quantization has 7 bits"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "iq4"}}, r'quantization\.mode "iq4" is not supported'),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"lm_head\.weight .* is not 4 bits in groups of 64"),
        ({"quantization": None, "quantization_config": None}, r"model\.safetensors: .* is packed, but"),
        (
            {"quantization": None, "quantization_config": {"quant_method": "bitnet", "bits": 4}},
            r'quant_method "bitnet"',
        ),
    ],
    ids=["bits", "mode", "group", "unsaid", "method"],
)
def test_quantisation_that_is_not_understood_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    quantised(write_checkpoint(tmp_path, TinyModel(layers=2)))
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=says):
        prompt_logits(tmp_path, (), 2)


def test_a_packed_weight_without_biases_is_named(tmp_path: Path) -> None:
    quantised(write_checkpoint(tmp_path, TinyModel(layers=2)))
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(tensors, dict)
    tensors.pop("model.layers.1.mlp.up_proj.biases")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tensors))
    with pytest.raises(ModelError, match=r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.biases is missing"):
        prompt_logits(tmp_path, (), 2)
