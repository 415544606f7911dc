"""The test sequences for every model: prompts longer than its windows, in two chunks, then greedy decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tools.architectures.sizes import VOCAB

DECODE_STEPS = 6
CHUNKS = ((23, 18), (17, 12), (9, 2))
"""Prefill chunks of each sequence. The first sequence crosses windows of 16 twice; the others are shorter."""


@dataclass(frozen=True)
class Alone:
    """One sequence computed by mlx-lm, unsplit and alone. logits[i]: float32 `[n, vocab]` of forward number i."""

    token_ids: list[int]
    schedule: list[tuple[int, int]]
    logits: list[np.ndarray]


def compute_alone(model_dir: Path) -> list[Alone]:
    """Computes every sequence of CHUNKS with mlx-lm alone, each with its own prompt cache."""
    model, _ = load_model(model_dir)
    rng = np.random.default_rng(11)
    return [_one_alone(model, chunks, rng.integers(0, VOCAB, sum(chunks)).tolist()) for chunks in CHUNKS]


def _one_alone(model: object, chunks: tuple[int, ...], token_ids: list[int]) -> Alone:
    cache = make_prompt_cache(model)
    starts = [0, *np.cumsum(chunks).tolist()]
    schedule = [*zip(starts, chunks, strict=False), *((starts[-1] + i, 1) for i in range(DECODE_STEPS))]
    logits: list[np.ndarray] = []
    for pos0, n in schedule:
        if pos0 == len(token_ids):
            token_ids.append(int(logits[-1][-1].argmax()) % VOCAB)
        out = model(mx.array([token_ids[pos0 : pos0 + n]], mx.int32), cache=cache)  # type: ignore[operator]
        out = out[0].astype(mx.float32)
        mx.eval(out, [entry.state for entry in cache])
        logits.append(np.array(out))
    return Alone(token_ids, schedule, logits)
