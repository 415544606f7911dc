"""MLX's quantised formats become the numbers that MLX itself makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from exo_mesh_numpy import provider
from exo_mesh_numpy.floats import narrow_to_bfloat16, widen_bfloat16
from exo_mesh_numpy.quantised import NumpyPacking, dequantise

from exo_mesh.domain.frame import Row
from exo_mesh.errors import ModelError
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.quantising import edit_config, quantise
from tests.support.ring import Ring

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
IDS = np.random.default_rng(8).integers(0, 299, 40).astype(np.int32)


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_values_are_those_of_mlx(mode: str, bits: int, group_size: int) -> None:
    rng = np.random.default_rng(bits * group_size)
    matrix = mx.array(rng.standard_normal((24, 256), dtype=np.float32) * rng.choice([1e-3, 1, 30], (24, 1)))
    packed = mx.quantize(matrix, group_size=group_size, bits=bits, mode=mode)
    settings = {"group_size": group_size, "bits": bits, "mode": mode}
    words, scales, *biases = packed
    expected = np.array(mx.dequantize(words, scales, *biases, dtype=mx.float32, **settings))
    out = np.empty(expected.shape, np.float32)
    arrays = [np.array(array) for array in packed]
    dequantise(arrays[0], arrays[1], arrays[2] if biases else None, NumpyPacking(mode, bits, group_size), out)
    # MLX may fuse scale * value + bias into one rounding
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-7 * float(np.abs(expected).max()))


def compare(directory: Path) -> None:
    from exo_mesh_mlx import provider as mlx_provider

    results = []
    for engine in (provider, mlx_provider):
        ring = Ring(engine, directory, 4, (2,))
        ring.insert(1)
        results.append(ring.forward([Row(1, 0, 40, 40)], IDS))
        ring.close()
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 4, 64), ("affine", 3, 32), ("affine", 6, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_model_has_the_logits_of_mlx(
    tmp_path: Path, mode: str, bits: int, group_size: int, tied: bool
) -> None:
    model = TinyModel("qwen3", layers=4, tied=tied)
    quantise(write_checkpoint(tmp_path, model), group_size=group_size, bits=bits, mode=mode)
    compare(tmp_path)


def test_modules_may_differ_in_how_they_are_quantised(tmp_path: Path) -> None:
    def choose(path: str) -> Any:
        if "embed" in path:
            return False
        return {"group_size": 32, "bits": 8} if "down_proj" in path or "v_proj" in path else True

    quantise(write_checkpoint(tmp_path, TinyModel("llama", layers=4)), choose, group_size=64, bits=4)
    compare(tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"group_size": 64, "bits": 7}, "bits=7"),
        ({"group_size": 48, "bits": 4}, "group_size=48"),
        ({"group_size": 64, "bits": 4, "mode": "nf4"}, 'mode "nf4"'),
        ({"group_size": 32, "bits": 8, "mode": "mxfp4"}, "mxfp4 with bits=8"),
        ({"group_size": 32, "bits": 4}, "scales has shape"),
        ({"group_size": 64, "bits": 8}, "weight has shape"),
        ({}, "bits=null"),
    ],
    ids=str,
)
def test_settings_that_are_unknown_or_do_not_fit_are_refused(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    quantise(write_checkpoint(tmp_path, TinyModel("llama", layers=4)), group_size=64, bits=4)
    edit_config(tmp_path, quantization=settings, quantization_config=settings)
    with pytest.raises(ModelError, match=says) as caught:
        Ring(provider, tmp_path, 4, ())
    assert str(tmp_path) in str(caught.value)


def test_bfloat16_is_rounded_as_mlx_does() -> None:
    rng = np.random.default_rng(1)
    odd = np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    values = np.concatenate([odd, rng.standard_normal(2000).astype(np.float32)])
    bits = narrow_to_bfloat16(values)
    expected = np.array(mx.array(values).astype(mx.bfloat16).astype(mx.float32))
    wide = np.empty(len(values), np.float32)
    widen_bfloat16(bits, wide)
    np.testing.assert_array_equal(wide, expected)
