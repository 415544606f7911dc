"""Final hidden states from the llama.cpp engine are those of the NumPy engine, which are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import exo_mesh_numpy
import numpy as np
import pytest
from exo_mesh_llamacpp import provider

from exo_mesh.domain.frame import Row
from tests.engines.vector_checks import CUTS, IDS, LONG, SHORT, check_states
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.ring import Ring

pytestmark = pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")

LAYERS = 6


def whole_states(model_dir: Path, ids: np.ndarray) -> np.ndarray:
    whole = Ring(exo_mesh_numpy.provider, model_dir, LAYERS, ())
    whole.insert(1)
    states = whole.final_states([Row(1, 0, len(ids), num_hidden=len(ids))], ids)
    whole.close()
    return states


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_ring_of_llamacpp_gives_the_final_states(tmp_path: Path, arch: str, cuts: Sequence[int]) -> None:
    write_checkpoint(tmp_path, TinyModel(arch, layers=LAYERS))
    ring = Ring(provider, tmp_path, LAYERS, cuts, kv="f32", threads="1")
    check_states(ring, whole_states(tmp_path, IDS[:LONG]), whole_states(tmp_path, IDS[LONG : LONG + SHORT]), 1e-4)
    ring.close()


def test_a_text_longer_than_one_pass_has_all_its_states(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyModel("llama", layers=LAYERS))
    ids = np.random.default_rng(5).integers(3, 290, 200).astype(np.int32)
    ring = Ring(provider, tmp_path, LAYERS, (2,), kv="f32", threads="1")
    ring.insert(1, max_tokens=256)
    found = ring.final_states([Row(1, 0, 200, num_hidden=200)], ids)
    whole = Ring(exo_mesh_numpy.provider, tmp_path, LAYERS, ())
    whole.insert(1, max_tokens=256)
    np.testing.assert_allclose(found, whole.final_states([Row(1, 0, 200, num_hidden=200)], ids), rtol=0, atol=1e-4)
    whole.close()
    ring.close()
