"""Checkpoints of GPTQ, AWQ, compressed-tensors and FP8 on the engines that read them: the model of plain weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exo_mesh_numpy import provider as numpy_provider

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import EngineProvider
from exo_mesh.errors import ModelError
from exo_mesh.weights.excerpt import write_excerpt
from tests.support.checkpoints import TinyModel, write_json
from tests.support.packed_checkpoints import FORMATS, write_packed
from tests.support.ring import Ring

LAYERS = 2
MODEL = TinyModel("qwen3", layers=LAYERS, hidden=128, intermediate=192)
IDS = np.arange(40, 49, dtype=np.int32)
ONE_OF_EACH = ("gptq-4-reordered", "awq", "compressed-4-zeros", "int8-zeros", "fp8-blocks")


def logits(provider: EngineProvider, directory: Path, cuts: tuple[int, ...] = (), **options: str) -> np.ndarray:
    ring = Ring(provider, directory, LAYERS, cuts, **options)
    ring.insert(1)
    found = ring.forward([Row(1, 0, len(IDS), len(IDS))], IDS)
    ring.close()
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ONE_OF_EACH else pytest.mark.extended) for name in FORMATS]
)
def test_numpy_computes_what_it_does_with_plain_weights(tmp_path: Path, name: str) -> None:
    packed, plain = write_packed(tmp_path, MODEL, FORMATS[name])
    want = logits(numpy_provider, plain)
    np.testing.assert_allclose(logits(numpy_provider, packed, (1,)), want, atol=1e-5 * np.ptp(want))
    assert np.ptp(want) > 0.1
    assert numpy_provider.survey(packed, {}) == numpy_provider.survey(plain, {})


@pytest.mark.parametrize("name", ("gptq-4-reordered", "awq", "fp8-blocks"))
def test_torch_computes_what_it_does_with_plain_weights(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    from exo_mesh_torch import provider

    packed, plain = write_packed(tmp_path, MODEL, FORMATS[name])
    options = {"dtype": "float32", "threads": "1"}
    want = logits(provider, plain, (), **options)
    np.testing.assert_allclose(logits(provider, packed, (1,), **options), want, atol=1e-5 * np.ptp(want))
    assert provider.survey(packed, options) == provider.survey(plain, options)


@pytest.mark.parametrize("name", ["gptq-4", "fp8-blocks"])
def test_the_excerpt_for_a_self_test_is_quantised_too(tmp_path: Path, name: str) -> None:
    packed, plain = write_packed(tmp_path, MODEL, FORMATS[name])
    excerpt = write_excerpt(packed, tmp_path / "excerpt", (0, 1))
    want = logits(numpy_provider, plain)
    np.testing.assert_allclose(logits(numpy_provider, excerpt), want, atol=1e-5 * np.ptp(want))


@pytest.mark.parametrize("method", ["bitnet", "modelopt", "mxfp4"])
def test_other_formats_are_refused_by_name(tmp_path: Path, method: str) -> None:
    packed, _ = write_packed(tmp_path, MODEL, FORMATS["gptq-4"])
    write_json(packed / "config.json", {"quantization_config": {"quant_method": method, "bits": 4}, "model_type": "x"})
    with pytest.raises(ModelError, match="not supported"):
        numpy_provider.survey(packed, {})
