"""Quantised blocks become the very floats that the reference makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from exo_mesh.weights.gguf import BLOCK_SIZES
from exo_mesh.weights.gguf_blocks import READABLE, dequantise
from exo_mesh.weights.gguf_codes import CODED, GROUP_SIZE

reference = pytest.importorskip("gguf")


@pytest.mark.parametrize("dtype", READABLE)
def test_blocks_of_any_bytes_become_the_floats_of_the_reference(dtype: str) -> None:
    elements, block_bytes = BLOCK_SIZES[dtype]
    blocks = np.random.default_rng(3).integers(0, 256, (300, block_bytes), dtype=np.uint8)
    if dtype in ("F32", "F16", "BF16"):
        blocks = np.random.default_rng(3).integers(0, 256, (300, block_bytes * 16), dtype=np.uint8)
        elements *= 16
    out = np.full((300, elements), 7, np.float32)
    dequantise(dtype, blocks, out)
    with np.errstate(all="ignore"):
        expected = reference.dequantize(blocks, reference.GGMLQuantizationType[dtype]).astype(np.float32)
    both_nan = np.isnan(out) & np.isnan(expected.reshape(out.shape))
    assert np.all((out.view(np.uint32) == expected.reshape(out.shape).view(np.uint32)) | both_nan)


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values_are_near_the_original(dtype: str) -> None:
    values = np.random.default_rng(4).standard_normal((10, 64)).astype(np.float32)
    packed = reference.quantize(values, reference.GGMLQuantizationType[dtype])
    elements, block_bytes = BLOCK_SIZES[dtype]
    out = np.empty((20, elements), np.float32)
    dequantise(dtype, packed.reshape(-1, block_bytes), out)
    step = 2 * np.abs(values).max() / (255 if dtype == "Q8_0" else 2 ** int(dtype[1]) - 1)
    assert np.abs(out.reshape(values.shape) - values).max() <= 1.1 * step


@pytest.mark.parametrize("dtype", CODED)
def test_codes_and_their_factors_are_the_values_of_the_block(dtype: str) -> None:
    elements, block_bytes = BLOCK_SIZES[dtype]
    blocks = np.random.default_rng(5).integers(0, 256, (300, block_bytes), dtype=np.uint8)
    halves = 4 if dtype in ("Q4_1", "Q4_K") else 2
    factors = np.random.default_rng(6).uniform(0.5, 2.0, (300, halves // 2)).astype("<f2")
    blocks[:, :halves] = factors.view(np.uint8)
    expected = np.empty((300, elements), np.float32)
    dequantise(dtype, blocks, expected)
    codes, scales, biases = CODED[dtype].take_apart(blocks)
    assert codes.max() == 2 ** CODED[dtype].bits - 1 and codes.min() == 0
    grouped = codes.reshape(300, -1, GROUP_SIZE) * scales[..., None] + biases[..., None]
    np.testing.assert_allclose(grouped.reshape(expected.shape), expected, rtol=0, atol=1e-6 * np.abs(expected).max())
