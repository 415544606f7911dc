"""Log-likelihoods of a text that a package ships are those of llama.cpp, and near to those of exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("xllamacpp")

from exo_mesh_llamacpp.stage import LlamaCppStage
from exo_mesh_llamacpp.whole import load_whole

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from tests.real.real_model import UNHURRIED
from tests.support.exactness import logits_alone
from tests.support.serving import ServingRing, load_stages
from tools.real_model import LAYERS, shipped_text

pytestmark = pytest.mark.extended

NUM_TOKENS = 160
TOLERANCE = 1e-3
LOSS = 0.02
"""Most nats per token that 8-bit activations may cost on this text, beside float32. Measured: 0.002."""

Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> Ids:
    return tuple(tokenizer.encode(shipped_text()[:2000], add_special_tokens=False).ids[:NUM_TOKENS])


@pytest.fixture(scope="module")
def by_llama_cpp(model_file: Path, ids: Ids) -> np.ndarray:
    """What llama.cpp itself gives for the whole file and the ids."""
    stage = LlamaCppStage(lambda asked, _: load_whole(model_file, asked))
    shard = Shard("model", 0, LAYERS, LAYERS)
    stage.load(LoadRequest(shard, model_file.parent, 1024, {"threads": "1"}), lambda done, total: None)
    return of_ring([stage], ids)


def of_ring(stages: Sequence[StageEngine], ids: Ids) -> np.ndarray:
    """Float64 `[tokens - 1]`: of each id but the first, as a request gets them. Closes the stages."""
    ring = ServingRing(stages, prefill_chunk=64, **UNHURRIED)
    asked = ring.submit(ids, 0, prompt_logprobs=1)
    ring.run()
    for stage in stages:
        stage.close()
    found = {entry.index: entry.logprob for message in asked.answers.messages for entry in message.prompt}
    assert sorted(found) == list(range(1, len(ids)))
    return np.array([found[index] for index in sorted(found)])


def of_logits(stage: StageEngine, ids: Ids) -> np.ndarray:
    """Float64 `[tokens - 1]`: of each id but the first. Closes the stage."""
    logits = logits_alone(stage, ids[:1], ids[1:]).astype(np.float64)
    stage.close()
    shifted = logits - logits.max(1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize(
    "cuts",
    [pytest.param((), marks=pytest.mark.slow), (15,), pytest.param((10, 20), marks=pytest.mark.slow)],
    ids=["1 stage", "2 stages", "3 stages"],
)
def test_stages_score_a_text_as_llama_cpp_does(
    model_dir: Path, by_llama_cpp: np.ndarray, ids: Ids, cuts: tuple[int, ...]
) -> None:
    found = of_ring(load_stages("llamacpp", model_dir, cuts, {"threads": "1"}), ids)
    assert np.abs(found - by_llama_cpp).max() < TOLERANCE


def test_eight_bit_activations_cost_little(model_dir: Path, by_llama_cpp: np.ndarray, ids: Ids) -> None:
    (exact,) = load_stages("numpy", model_dir, ())
    losses = of_logits(exact, ids).mean() - by_llama_cpp.mean()
    assert abs(losses) < LOSS
    assert by_llama_cpp.mean() > -4, "a text of this language: a model that computes nonsense has -10"
