"""Weights of GPTQ, AWQ, compressed-tensors and FP8 that torch keeps as they are in the file. Runs without MLX."""

from __future__ import annotations

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
from exo_mesh_torch.byte_matrices import Float8Matrix, RowMatrix, float8_bytes, row_matrix_bytes

from tests.engines.test_torch_small_weights import LAYERS, logits, rms
from tests.support.checkpoints import TinyModel
from tests.support.packed_checkpoints import E4M3, FORMATS, write_packed

pytestmark = pytest.mark.skipif(not int4.can_multiply(), reason="torch has no fast 4-bit kernel on this machine")

MODEL = TinyModel("qwen3", layers=LAYERS, hidden=128, intermediate=256)
QUICK = ("gptq-4-reordered", "int8-zeros", "fp8-odd-blocks")
SHARE = {"gptq-2": 1.0, "gptq-8": 0.29, "compressed-8-groups": 0.33, "compressed-4-reordered": 0.2, "awq-32": 0.18,
         "gptq-4-v2": 0.18, "gptq-4-reordered": 0.2}  # fmt: skip
"""Most memory of the layers' matrices beside that of float32, where it is not the usual one."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def check_model(tmp_path: Path, name: str) -> None:
    packed, plain = write_packed(tmp_path, MODEL, FORMATS[name])
    want, _ = logits(plain, dtype="float32")
    rounded, _ = logits(plain, dtype="bfloat16")
    got, _ = logits(packed, dtype="float32", quantised="on")
    assert rms(got - want) < 2 * rms(rounded - want), "about as near as plain weights in bfloat16"
    parts, held = logits(packed, (1,), dtype="float32", quantised="on")
    np.testing.assert_array_equal(parts, got)
    small, usual = (provider.survey(packed, {"dtype": "float32", "quantised": how}) for how in ("on", "off"))
    for (start, stop), found in zip(pairwise([0, 1, 2]), held, strict=True):
        beside = small.embed_bytes if start == 0 else small.head_bytes
        assert 0 <= found - sum(small.layer_bytes[start:stop]) - beside < 4096
    share = SHARE.get(name, 0.27 if "8" in name else 0.15)
    assert small.layer_bytes[0] < usual.layer_bytes[0] * share + 8192  # norms, and columns in another order


@pytest.mark.parametrize("name", QUICK)
def test_a_model_of_kept_weights_computes_what_the_plain_one_does(tmp_path: Path, name: str) -> None:
    check_model(tmp_path, name)


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in QUICK])
def test_a_model_of_kept_weights_computes_so_in_every_format(tmp_path: Path, name: str) -> None:
    check_model(tmp_path, name)


@pytest.mark.parametrize("zero", [128, 100])
def test_rows_with_a_scale_multiply_to_the_accuracy_of_bfloat16(zero: int) -> None:
    """By the kernel and by blocks, with and without zero points."""
    generator = torch.Generator().manual_seed(zero)
    codes = torch.randint(0, 256, (200, 512), dtype=torch.uint8, generator=generator)
    scales = (0.5 + torch.rand(200, generator=generator)) / 256
    matrix = RowMatrix(200, 512)
    for first, count in ((0, 64), (64, 136)):
        part = slice(first, first + count)
        matrix.fill(first, codes[part], scales[part], -zero * scales[part])
    assert matrix.num_bytes == row_matrix_bytes(200, 512)
    weights = (codes.double() - zero) * scales.double()[:, None]
    for count in (0, 1, 7, int4.MAX_KERNEL_ROWS + 1):
        states = torch.randn((count, 512), generator=generator)
        got, want = matrix.multiply(states), states.double() @ weights.T
        assert got.dtype == torch.float32 and got.shape == (count, 200)
        if count:
            assert float((got - want).abs().max()) < 0.02 * float(want.std())
    ids = torch.tensor([0, 63, 199])
    torch.testing.assert_close(matrix.lines(ids), weights[ids].float())


@pytest.mark.parametrize("block", [(128, 128), (48, 80), (1, 512), (200, 512)])
def test_8_bit_floats_multiply_as_their_values(block: tuple[int, int]) -> None:
    """All patterns are there, the smallest numbers too."""
    codes = (torch.arange(200 * 512) % 127).reshape(200, 512).to(torch.uint8)
    codes[:, ::3] |= 0x80
    shape = -(-200 // block[0]), -(-512 // block[1])
    scales = 1e-3 * (0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(3)))
    matrix = Float8Matrix(200, 512, scales, block)
    matrix.fill(0, codes[:64])
    matrix.fill(64, codes[64:])
    assert matrix.num_bytes == float8_bytes(200, 512, block)
    wide = scales.repeat_interleave(block[0], 0)[:200].repeat_interleave(block[1], 1)[:, :512]
    numbers = torch.from_numpy(E4M3)[(codes & 0x7F).long()] * torch.where(codes >= 0x80, -1, 1)
    torch.testing.assert_close(matrix.lines(torch.arange(200)), (numbers * wide).float(), rtol=1e-6, atol=0)
    for count in (0, 1, 65):
        states = torch.randn((count, 512), generator=torch.Generator().manual_seed(count))
        want = (states.double() @ (numbers * wide).T).float()
        torch.testing.assert_close(matrix.multiply(states), want, rtol=1e-4, atol=1e-5)


@pytest.mark.extended
def test_a_cpu_without_avx512_multiplies_the_same(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from tests.engines import test_torch_packed_formats as here
assert here.int4.can_multiply()
here.test_rows_with_a_scale_multiply_to_the_accuracy_of_bfloat16(100)
here.test_8_bit_floats_multiply_as_their_values((128, 128))
for name in here.QUICK:
    here.check_model(Path(NAME) / name, name)
""".replace("NAME", repr(str(tmp_path)))
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
