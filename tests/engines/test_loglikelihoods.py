"""Log-likelihoods of prompts, as lm-eval asks for them, are those of transformers on the same checkpoint to 1e-3."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from exo_mesh.domain.request import PromptLogprob, TokenLogprob
from tests.support.serving import ServingRing, load_stages
from tools.architectures.torch_models import whole_model_logits, write_random_model

TOLERANCE = 1e-3
CONTEXT, CONTINUATION = 23, 41
IDS = np.random.default_rng(3).integers(3, 90, CONTEXT + CONTINUATION).astype(np.int32)

pytestmark = pytest.mark.extended

OPTIONS = {"torch": {"dtype": "float32", "threads": "1"}, "numpy": {}, "mlx": {}}
"""All compute in float32."""


def by_transformers(model_dir: Path) -> np.ndarray:
    """Float64 `[tokens, vocab]`: log-softmax at each position."""
    logits = whole_model_logits(model_dir, IDS, ((0, len(IDS)),)).astype(np.float64).reshape(len(IDS), -1)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def by_ring(engine: str, model_dir: Path, cuts: tuple[int, ...]) -> list[PromptLogprob]:
    """Of a request that draws nothing, on stages of one engine."""
    stages = load_stages(engine, model_dir, cuts, OPTIONS[engine])
    ring = ServingRing(stages, prefill_chunk=16)
    asked = ring.submit(tuple(IDS.tolist()), 0, prompt_logprobs=5)
    ring.run()
    for stage in stages:
        stage.close()
    assert not any(ring.leftovers().values())
    told = [entry for message in asked.answers.messages for entry in message.prompt]
    return [
        PromptLogprob(entry.index, entry.logprob, tuple(TokenLogprob(top.token_id, top.logprob) for top in entry.top))
        for entry in told
    ]


@pytest.mark.parametrize("engine", ["torch", "numpy", "mlx"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_likelihoods_are_those_of_transformers(tmp_path: Path, engine: str, family: str) -> None:
    if engine == "mlx":
        pytest.importorskip("mlx_lm")
    model_dir = write_random_model(tmp_path, family)
    expected, entries = by_transformers(model_dir), by_ring(engine, model_dir, (3,))
    assert [entry.index for entry in entries] == list(range(1, len(IDS)))
    wanted = expected[np.arange(len(IDS) - 1), IDS[1:]]
    got = np.array([entry.logprob for entry in entries])
    assert np.abs(got - wanted).max() < TOLERANCE
    assert abs(got[CONTEXT - 1 :].sum() - wanted[CONTEXT - 1 :].sum()) < TOLERANCE, "what lm-eval adds up"
    for place, entry in enumerate(entries):
        best = np.sort(expected[place])[::-1][:5]
        assert np.abs(best - [top.logprob for top in entry.top]).max() < TOLERANCE
        greedy = bool(expected[place].argmax() == IDS[place + 1])
        assert greedy == (entry.top[0].token_id == IDS[place + 1]), "what lm-eval calls is_greedy"
