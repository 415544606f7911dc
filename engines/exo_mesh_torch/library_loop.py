"""transformers' own greedy `generate`, with which `exo-mesh bench engines` compares this engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from exo_mesh.engine.measure import Loop, TimedGeneration


class _Clock:
    """A streamer that records when each token came; `generate` passes it the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: nothing is buffered."""


def open_loop(model_dir: Path, options: Mapping[str, str]) -> Loop:
    """Load the whole model with transformers, in the `dtype` of the options or of its files."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=options.get("dtype", "auto")).to(device).eval()

    def loop(prompt: Sequence[int], num_steps: int) -> TimedGeneration:
        ids, clock = torch.tensor([list(prompt)], device=device), _Clock()
        limits = {"max_new_tokens": num_steps + 1, "min_new_tokens": num_steps + 1}
        with torch.inference_mode():
            begin = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=clock, **limits)
        _, first, *others = clock.times
        return TimedGeneration(first - begin, others[-1] - first, len(others))

    return loop
