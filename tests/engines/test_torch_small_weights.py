"""Quantised weights that stay codes: their numbers, bytes and refusals. Runs without MLX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from exo_mesh_torch import int4, provider
from exo_mesh_torch.int4 import CodeMatrix, held_bytes
from exo_mesh_torch.quantised import unpack
from exo_mesh_torch.small_weights import wants_small_weights
from safetensors.torch import load_file, save_file

from exo_mesh.domain.frame import Row
from exo_mesh.errors import InputError, ModelError
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json
from tests.support.ring import Ring

pytestmark = pytest.mark.skipif(not int4.can_multiply(), reason="torch has no fast 4-bit kernel on this machine")

LAYERS = 2
IDS = np.arange(3, 83, dtype=np.int32) % 300


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_codes(rows: int, columns: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and biases as MLX makes them of weights around zero."""
    generator = torch.Generator().manual_seed(rows + bits)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = (0.5 + torch.rand((rows, columns // group), generator=generator)) / 2**bits
    return codes, scales.bfloat16(), (-(2 ** (bits - 1)) * scales + 0.01).bfloat16()


def plain(codes: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """float64 values."""
    grouped = codes.double().reshape(*scales.shape, -1)
    return (grouped * scales.double()[..., None] + biases.double()[..., None]).flatten(1)


@pytest.mark.parametrize("group", int4.GROUP_SIZES)
@pytest.mark.parametrize("bits", int4.BITS)
def test_a_matrix_of_codes_multiplies_as_the_plain_one_to_the_accuracy_of_bfloat16(bits: int, group: int) -> None:
    """By the kernel and by blocks, for numbers of rows that fill no block."""
    codes, scales, biases = random_codes(200, 512, bits, group)
    matrix = CodeMatrix(200, 512, bits, group)
    for first in (0, 64, 128):
        part = slice(first, min(200, first + 64)) if first < 128 else slice(128, 200)
        matrix.fill(first, codes[part], scales[part], biases[part])
    assert matrix.num_bytes == held_bytes(200, 512, bits, group)
    weights = plain(codes, scales, biases)
    for count in (0, 1, 7, int4.MAX_KERNEL_ROWS + 1):
        states = torch.randn((count, 512), generator=torch.Generator().manual_seed(count))
        want = states.double() @ weights.T
        got = matrix.multiply(states)
        assert got.dtype == torch.float32 and got.shape == (count, 200)
        if count:
            assert float((got - want).abs().max()) < 0.02 * float(want.std())
    ids = torch.tensor([0, 31, 32, 63, 64, 199])
    assert float((matrix.lines(ids) - weights[ids]).abs().max()) < 2**-8 * float(weights.abs().max())


def quantise(source: Path, target: Path, bits: int, group: int) -> Path:
    """A copy of a checkpoint with all matrices in MLX's affine format."""
    config = json.loads((source / "config.json").read_text())
    target.mkdir()
    write_json(target / "config.json", {**config, "quantization": {"bits": bits, "group_size": group}})
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim < 2:
            tensors[name] = tensor
            continue
        grouped = tensor.float().unflatten(-1, (-1, group))
        low, high = grouped.amin(-1), grouped.amax(-1)
        scales = ((high - low) / (2**bits - 1)).bfloat16()
        biases = low.bfloat16()
        codes = ((grouped - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 2**bits - 1)
        module = name.removesuffix(".weight")
        tensors[name] = to_words(codes.flatten(-2).to(torch.uint8), bits)
        tensors |= {f"{module}.scales": scales, f"{module}.biases": biases}
    save_file(tensors, target / "model.safetensors")
    return target


def to_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    data = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    assert torch.equal(unpack(data, bits), codes)
    return data.contiguous().view(torch.uint32)


def logits(directory: Path, cuts: tuple[int, ...] = (), **options: str) -> tuple[np.ndarray, list[int]]:
    """Of a prompt of 80 tokens and two steps, through stages cut there; and the bytes of each stage before that."""
    ring = Ring(provider, directory, LAYERS, cuts, **{"threads": "1", **options})
    held = [stage.memory_bytes() for stage in ring.stages]
    ring.insert(1)
    found = [ring.forward([Row(1, 0, 80, 4)], IDS)]
    found += [ring.forward([Row(1, 80 + step, 1, 1)], IDS[step : step + 1]) for step in range(2)]
    ring.close()
    return np.concatenate(found), held


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bits", int4.BITS)
def test_a_model_of_codes_computes_what_the_dequantised_one_does(tmp_path: Path, bits: int, tied: bool) -> None:
    model = TinyModel("qwen3", layers=LAYERS, hidden=128, intermediate=256, tied=tied)
    directory = quantise(write_checkpoint(tmp_path / "plain", model), tmp_path / "codes", bits, 64)
    want, plain_bytes = logits(directory, dtype="float32")
    got, small_bytes = logits(directory, dtype="float32", quantised="on")
    rounded, _ = logits(directory, dtype="bfloat16")
    assert rms(got - want) < 2 * rms(rounded - want), "about as near as plain weights in bfloat16"
    assert rms(got - want) < 0.03 * rms(want)
    assert sum(small_bytes) < sum(plain_bytes) * bits / 32 * 1.3
    parts, held = logits(directory, (1,), dtype="float32", quantised="on")
    np.testing.assert_array_equal(parts, got)
    survey = provider.survey(directory, {"dtype": "float32", "quantised": "on"})
    for (start, stop), found in zip(pairwise([0, 1, 2]), held, strict=True):
        beside = survey.embed_bytes if start == 0 else survey.head_bytes
        assert 0 <= found - sum(survey.layer_bytes[start:stop]) - beside < 4096


def test_groups_that_the_kernel_does_not_take_stay_plain(tmp_path: Path) -> None:
    model = TinyModel(layers=LAYERS)
    directory = quantise(write_checkpoint(tmp_path / "plain", model), tmp_path / "codes", 4, 16)
    want, plain_bytes = logits(directory, dtype="float32")
    got, held = logits(directory, dtype="float32", quantised="on")
    np.testing.assert_array_equal(got, want)
    assert held == plain_bytes


def test_code_that_uses_the_weights_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain weights would take the memory that the plan did not count."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.gate_proj.weight)  # not by calling the layer

    directory = quantise(write_checkpoint(tmp_path / "plain", TinyModel(layers=LAYERS)), tmp_path / "codes", 4, 32)
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(ModelError, match="quantised=off"):
        logits(directory, quantised="on")


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    directory = quantise(write_checkpoint(tmp_path / "plain", TinyModel(layers=LAYERS)), tmp_path / "codes", 4, 32)
    file = directory / "model.safetensors"
    os.truncate(file, file.stat().st_size - 64)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        logits(directory, quantised="on")


def test_the_option_needs_a_cpu() -> None:
    with pytest.raises(InputError, match="no fast kernel for 4-bit weights on cuda"):
        wants_small_weights({"quantised": "on"}, torch.device("cuda"))
    assert not wants_small_weights({}, torch.device("cpu"))


@pytest.mark.extended
@pytest.mark.parametrize(("capability", "says"), [("avx2", "True"), ("default", "False")])
def test_a_cpu_without_avx512_has_another_order_and_one_without_avx2_none(capability: str, says: str) -> None:
    code = """
from tests.engines import test_torch_small_weights as here
print(here.int4.can_multiply())
if here.int4.can_multiply():
    for bits in (4, 8):
        here.test_a_matrix_of_codes_multiplies_as_the_plain_one_to_the_accuracy_of_bfloat16(bits, 64)
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, says), done.stderr
