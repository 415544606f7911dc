"""Final hidden states, of which vectors are made: every engine gives what transformers gives, over any number of
stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import exo_mesh_numpy
import exo_mesh_torch
import torch
from transformers import AutoModel

from tests.engines.vector_checks import CUTS, IDS, LONG, SHORT, check_body_alone, check_states
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.ring import Ring

SLACK = 1e-4
LAYERS = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing by threads, and wait for them on a busy machine."""
    torch.set_num_threads(1)
    yield


def states_of(model_dir: Path, ids: np.ndarray) -> np.ndarray:
    """transformers' own last_hidden_state, float32 `[tokens, width]`."""
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0])


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_a_ring_gives_the_final_states_of_transformers(
    tmp_path: Path, engine: str, arch: str, cuts: Sequence[int]
) -> None:
    write_checkpoint(tmp_path, TinyModel(arch, layers=LAYERS, tied=arch == "qwen3"))
    provider = {"torch": exo_mesh_torch, "numpy": exo_mesh_numpy}[engine].provider
    ring = Ring(provider, tmp_path, LAYERS, cuts)
    check_states(ring, states_of(tmp_path, IDS[:LONG]), states_of(tmp_path, IDS[LONG : LONG + SHORT]), SLACK)
    ring.close()


def test_torch_reads_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    check_body_alone(exo_mesh_torch.provider, tmp_path)
