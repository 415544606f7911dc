"""Two tiers of exactness (docs/measurements/exactness.md): equal bits, or the likeliest token within a margin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import StageEngine, StageInput
from tests.support.serving import Asked, Tokens

EPSILON = {"float32": 1e-4, "bfloat16": 0.1}
"""Where rows share a multiplication, a token may be another than the likeliest if its logit is no further from it than
this, by the dtype that is computed in, relative to the rms of the logits. Measured on tiny models: 5e-6 and 0.06."""


def assert_same_bits(got: Asked, alone: Asked) -> None:
    """As far as it came, each token and each bit of the logits that it was drawn from is that of the request alone."""
    tokens, first = got.answers.tokens, got.answers.first
    assert tokens == alone.answers.tokens[first : first + len(tokens)]
    for step, (one, other) in enumerate(zip(got.logits, alone.logits[first:], strict=False), first):
        np.testing.assert_array_equal(one, other, err_msg=f"{got.request.request_id}, token {step}")


def assert_within_margin(whole: StageEngine, got: Asked, dtype: str) -> None:
    """Each token is the likeliest one, or by EPSILON as good as that, after the same context computed alone at once."""
    tokens, context = got.answers.tokens, (*got.request.prompt_ids, *got.request.resume_ids)
    for step, (logits, token) in enumerate(zip(logits_alone(whole, context, tokens), tokens, strict=True)):
        missing = float(logits.max() - logits[token]) / rms(logits)
        assert missing <= EPSILON[dtype], f"{got.request.request_id}, token {step}: {missing:.1e} of the rms is missing"


def logits_alone(whole: StageEngine, prompt: Tokens, output: Sequence[int]) -> np.ndarray:
    """float32 `[len(output), vocab]`: the logits that each output token should be drawn from. `whole` has all layers,
    and no other sequence 0."""
    if not output:
        return np.zeros((0, 1), np.float32)
    context = (*prompt, *output[:-1])
    whole.insert(0, len(context))
    made = whole.forward(StageInput((Row(0, 0, len(context), len(output)),), context, {}))
    whole.remove(0)
    assert made.logits is not None and not made.faults
    return made.logits


def rms(logits: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(logits, dtype=np.float64))))
