"""An MLX model cut into stages gives the very bits of the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from exo_mesh_mlx import provider
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import StageInput
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.ring import Ring

NUM_LAYERS = 6
PROMPT = np.random.default_rng(7).integers(0, 299, 29).astype(np.int32)
SCHEDULE = [(0, 17), (17, 12), *((29 + i, 1) for i in range(6))]
"""Prefill in two chunks, then six decode steps, as (pos0, n)."""

MODELS = {
    "llama": TinyModel("llama"),
    "llama-bf16-shards": TinyModel("llama", dtype="bfloat16", shards=3),
    "qwen2-tied": TinyModel("qwen2", tied=True),
    "qwen3": TinyModel("qwen3", seed=3),
}


def whole_model_logits(model_dir: Path, prompt: np.ndarray = PROMPT) -> tuple[np.ndarray, np.ndarray]:
    """(all token ids, logits of every position) by mlx-lm alone, with its own cache and the same schedule."""
    model, _ = load_model(model_dir)
    cache = make_prompt_cache(model)
    ids, logits = [int(i) for i in prompt], []
    for pos0, n in SCHEDULE:
        out = model(mx.array(ids[pos0 : pos0 + n])[None], cache=cache)[0].astype(mx.float32)
        mx.eval(out)
        logits.append(np.array(out))
        if pos0 + n == len(ids):
            ids.append(int(logits[-1][-1].argmax()))
    return np.array(ids, np.int32), np.concatenate(logits)


@pytest.fixture(scope="module", params=list(MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> tuple[np.ndarray, np.ndarray]:
    return whole_model_logits(checkpoint, PROMPT)


@pytest.mark.parametrize(
    "cuts",
    [(), (1,), *(pytest.param((cut,), marks=pytest.mark.extended) for cut in range(2, NUM_LAYERS)), (2, 3)],
    ids=str,
)
def test_logits_have_the_bits_of_the_whole_model(
    checkpoint: Path, expected: tuple[np.ndarray, np.ndarray], cuts: tuple[int, ...]
) -> None:
    ids, logits = expected
    ring = Ring(provider, checkpoint, NUM_LAYERS, cuts)
    ring.insert(1)
    for pos0, n in SCHEDULE:
        got = ring.forward([Row(1, pos0, n, n)], ids[pos0 : pos0 + n])
        np.testing.assert_array_equal(got, logits[pos0 : pos0 + n])
    assert len(set(ids[29:])) > 1, "the tokens are all the same: this test proves little"
    ring.close()


@pytest.fixture(scope="module")
def halves(checkpoint: Path) -> Iterator[Ring]:
    ring = Ring(provider, checkpoint, NUM_LAYERS, (3,), batch_attention="off")
    yield ring
    ring.close()


def test_sequences_of_different_lengths_share_frames(
    checkpoint: Path, halves: Ring, expected: tuple[np.ndarray, np.ndarray]
) -> None:
    """The second one is three positions behind, and its prefill chunk travels with a decode row of the first."""
    ids, logits = expected
    halves.insert(1, 2)
    halves.forward([Row(1, 0, 17), Row(2, 0, 17)], np.concatenate([ids[:17], ids[:17]]))
    halves.forward([Row(1, 17, 12)], ids[17:29])
    got = halves.forward([Row(2, 17, 12, 1), Row(1, 29, 1, 1)], np.concatenate([ids[17:29], ids[29:30]]))
    np.testing.assert_array_equal(got, logits[[28, 29]])
    for step in range(3):
        rows = [Row(1, 30 + step, 1, 1), Row(2, 29 + step, 1, 1)]
        got = halves.forward(rows, ids[[30 + step, 29 + step]])
        np.testing.assert_array_equal(got, logits[[30 + step, 29 + step]])
    halves.remove(1, 2)


def test_a_rejected_draft_leaves_no_trace(halves: Ring, expected: tuple[np.ndarray, np.ndarray]) -> None:
    ids, logits = expected
    halves.insert(1)
    halves.forward([Row(1, 0, 17)], ids[:17])
    halves.forward([Row(1, 17, 12)], ids[17:29])
    halves.forward([Row(1, 29, 4, 4)], ids[:4])
    for position in (29, 30):
        got = halves.forward([Row(1, position, 1, 1)], ids[position : position + 1])
        np.testing.assert_array_equal(got, logits[position : position + 1])
    halves.remove(1)


def test_activations_travel_in_the_dtype_that_the_layer_returned(checkpoint: Path, halves: Ring) -> None:
    halves.insert(1)
    output = halves.stages[0].forward(StageInput((Row(1, 0, 3),), tuple(PROMPT[:3].tolist()), {}))
    tensor = output.tensors["hidden"]
    config = json.loads((checkpoint / "config.json").read_text())
    assert (tensor.dtype, tensor.shape) == (config["torch_dtype"], (3, 64))
    halves.remove(1)
