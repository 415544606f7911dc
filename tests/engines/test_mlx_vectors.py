"""Final hidden states from the MLX engine are those of the NumPy engine, which are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import exo_mesh_mlx
import exo_mesh_numpy

from exo_mesh.domain.frame import Row
from tests.engines.vector_checks import CUTS, IDS, LONG, SHORT, check_body_alone, check_states
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.ring import Ring

LAYERS = 6


def states_of(model_dir: Path, ids: np.ndarray) -> np.ndarray:
    whole = Ring(exo_mesh_numpy.provider, model_dir, LAYERS, ())
    whole.insert(1)
    states = whole.final_states([Row(1, 0, len(ids), num_hidden=len(ids))], ids)
    whole.close()
    return states


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_ring_gives_the_final_states_of_the_whole_model(tmp_path: Path, arch: str, cuts: Sequence[int]) -> None:
    write_checkpoint(tmp_path, TinyModel(arch, layers=LAYERS))
    ring = Ring(exo_mesh_mlx.provider, tmp_path, LAYERS, cuts)
    check_states(ring, states_of(tmp_path, IDS[:LONG]), states_of(tmp_path, IDS[LONG : LONG + SHORT]), 1e-4)
    ring.close()


@pytest.mark.parametrize("engine", [exo_mesh_mlx, exo_mesh_numpy])
def test_a_checkpoint_without_a_head_is_read(tmp_path: Path, engine: Any) -> None:
    check_body_alone(engine.provider, tmp_path)
