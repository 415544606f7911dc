"""mlx-lm's own greedy generate loop, with which `exo-mesh bench engines` compares this engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from exo_mesh.engine.measure import Loop, TimedGeneration


def open_loop(model_dir: Path, options: Mapping[str, str]) -> Loop:
    """Load the whole model with mlx-lm, which ignores the options of this engine."""
    model, _ = load_model(model_dir)

    def loop(prompt: Sequence[int], num_steps: int) -> TimedGeneration:
        begin = time.perf_counter()
        tokens = generate_step(mx.array(list(prompt)), model, max_tokens=num_steps + 1)
        next(tokens)
        first = time.perf_counter()
        done = sum(1 for _ in tokens)
        return TimedGeneration(first - begin, time.perf_counter() - first, done)

    return loop
