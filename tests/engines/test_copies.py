"""A sequence that is copied goes on like its source in every kind of cache, also where nothing can be cut back."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.engine.conformance.stages import assert_close
from exo_mesh.engine.contract import EngineProvider, SequenceCopier, StageEngine
from exo_mesh.errors import EngineError
from tests.engines.serving_ways import flat_model
from tests.support.serving import ServingRing, load_stages
from tools.stages import Stages, forward, insert

LENGTH = 40
"""Positions of the prompt: longer than every window and chunk of the tiny models."""
STEPS = 4
TOLERANCE = 1e-4
"""Of a batch in torch, relative to the rms of the logits."""

MLX = {
    "gemma3_text": "windows that wrap",
    "llama4_text": "chunks",
    "deepseek_v3": "latents",
    "qwen3_next": "recurrent states beside keys and values",
    "longcat_flash_ngram": "the last few token ids",
    "mamba2": "recurrent states alone",
}
TORCH = {
    "gemma3_text": "windows",
    "llama4_text": "chunks",
    "deepseek_v3": "latents",
    "qwen3_next": "recurrent states beside keys and values",
    "mamba2": "recurrent states alone",
}


def mlx_model(directory: Path, architecture: str) -> tuple[EngineProvider, Path, int]:
    from exo_mesh_mlx import provider

    from tools.architectures.mlx_configs import tiny_config
    from tools.architectures.mlx_models import write_checkpoint
    from tools.architectures.sizes import LAYERS

    return provider, write_checkpoint(directory, tiny_config(architecture)), LAYERS


def torch_model(directory: Path, family: str) -> tuple[EngineProvider, Path, int]:
    from exo_mesh_torch import provider

    from tools.architectures.torch_families import NUM_LAYERS
    from tools.architectures.torch_models import write_random_model

    return provider, write_random_model(directory, family), NUM_LAYERS


def decode(ring: Sequence[StageEngine], sequence: int, token_ids: Sequence[int], pos0: int = LENGTH) -> np.ndarray:
    return np.concatenate([forward(ring, [Row(sequence, pos0 + i, 1, 1)], [id]) for i, id in enumerate(token_ids)])


def copy(ring: Sequence[StageEngine], source: int, sequence: int, upto: int) -> None:
    for stage in ring:
        assert isinstance(stage, SequenceCopier)
        stage.copy(source, sequence, upto, 64)


def check(provider: EngineProvider, model_dir: Path, num_layers: int, tolerance: float) -> None:
    """Two sequences go on from one prompt; each gets what it gets with a prefill of its own."""
    options = {"threads": "1"} if tolerance else {}
    stages = Stages(provider, model_dir, num_layers, **options)
    ring = stages.ring(())
    rng = np.random.default_rng(7)
    prompt, own, other = (rng.integers(3, 60, size).tolist() for size in (LENGTH, STEPS, STEPS))
    insert(ring, (1, 3, 4), 64)
    for sequence in (1, 3, 4):
        forward(ring, [Row(sequence, 0, LENGTH, 1)], prompt)
    copy(ring, 1, 2, LENGTH)
    assert_close(decode(ring, 2, other), decode(ring, 3, other), tolerance)
    assert_close(decode(ring, 1, own), decode(ring, 4, own), tolerance)
    try:
        copy(ring, 1, 5, LENGTH - 1)  # the source is some positions further by now
    except EngineError:
        assert not any(stage.capabilities.cuts_anywhere for stage in ring)
    else:
        insert(ring, [6], 64)
        forward(ring, [Row(6, 0, LENGTH - 1, 1)], prompt[:-1])
        assert_close(decode(ring, 5, other, LENGTH - 1), decode(ring, 6, other, LENGTH - 1), tolerance)
    stages.close()


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="needs mlx-lm")
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name == "mamba2" else pytest.mark.extended) for name in MLX]
)
def test_a_copy_in_mlx_has_the_bits_of_its_own_prefill(tmp_path: Path, architecture: str) -> None:
    check(*mlx_model(tmp_path, architecture), 0.0)


def check_cuts_in_chunks(made: tuple[EngineProvider, Path, int], tolerance: float) -> None:
    """A copy that ends some positions before its source goes on like a prefill of its own, or is refused, wherever in a
    chunk the two end."""
    provider, model_dir, num_layers = made
    stages = Stages(provider, model_dir, num_layers, **({"threads": "1"} if tolerance else {}))
    ring = stages.ring(())
    prompt = np.random.default_rng(7).integers(3, 60, LENGTH).tolist()
    refused = made_well = 0
    for length in range(14, 36):  # over the ends of two chunks
        for upto in range(length - 4, length):
            insert(ring, (1, 3), 64)
            forward(ring, [Row(1, 0, length - 1)], prompt[: length - 1])
            forward(ring, [Row(1, length - 1, 1, 1)], [prompt[length - 1]])
            try:
                copy(ring, 1, 2, upto)
            except EngineError:
                refused += 1
            else:
                forward(ring, [Row(3, 0, upto)], prompt[:upto])
                assert_close(decode(ring, 2, [5], upto), decode(ring, 3, [5], upto), tolerance)
                made_well += 1
            for stage in ring:
                for sequence in (1, 2, 3):
                    stage.remove(sequence)
    assert refused < made_well, "some positions may be gone, but most copies can be made"
    stages.close()


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="needs mlx-lm")
def test_a_shorter_copy_of_chunks_in_mlx_sees_its_whole_chunk_or_is_refused(tmp_path: Path) -> None:
    """It missed the beginning of its chunk if the source had begun the next chunk, and got a wrong token."""
    check_cuts_in_chunks(mlx_model(tmp_path, "llama4"), 0.0)


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_shorter_copy_of_chunks_in_torch_sees_its_whole_chunk_or_is_refused(tmp_path: Path) -> None:
    check_cuts_in_chunks(torch_model(tmp_path, "llama4_text"), TOLERANCE)


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("family", TORCH)
def test_a_copy_in_torch_goes_on_as_with_its_own_prefill(tmp_path: Path, family: str) -> None:
    check(*torch_model(tmp_path, family), TOLERANCE)


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="needs mlx-lm")
@pytest.mark.parametrize(
    "engines", [("numpy", "mlx"), pytest.param(("mlx", "numpy"), marks=pytest.mark.extended)], ids="-".join
)
def test_a_ring_of_two_engines_shares_a_prefill(tmp_path: Path, engines: tuple[str, str]) -> None:
    """Greedy, so that all choices have the text of one request alone; each draws it from rows of its own."""
    stages = mixed_stages(flat_model(tmp_path), engines)
    prompt = tuple(range(3, 43))
    alone = ServingRing(stages)
    wanted = alone.submit(prompt, 12)
    alone.run()
    ring = ServingRing(stages, prefill_chunk=16)
    choices = [ring.submit(prompt, 12, share_id="r") for _ in range(4)]
    ring.run()
    assert [choice.answers.tokens for choice in choices] == [wanted.answers.tokens] * 4
    assert ring.driver.beginnings.shared.saved_tokens == 3 * (len(prompt) - 1)
    computed = sum(row.n for frame in ring.frames for row in frame.rows)
    assert computed == len(prompt) - 1 + 4 * 12, "one prefill, and a row for each token"
    assert not any(ring.leftovers().values())
    for stage in stages:
        stage.close()


def mixed_stages(model_dir: Path, engines: Sequence[str]) -> list[StageEngine]:
    """The first half of the layers on one engine, the second half on another one."""
    halves = [load_stages(engine, model_dir, (2,)) for engine in engines]
    used = [halves[0][0], halves[1][1]]
    for stage in {id(stage): stage for half in halves for stage in half if stage not in used}.values():
        stage.close()
    return used
