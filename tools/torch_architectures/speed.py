"""`python -m tools.torch_architectures.speed [DTYPE] [THREADS] [PROMPT]`: compares the engine with transformers'
generate.

A random 125 M Llama, one process, the two in turns, so that other work on the machine hits both alike. With one thread
the time is that of the thread on a core, else what a clock shows. Prints tokens per second, medians of the turns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exo_mesh_torch import provider
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine, StageInput
from tests.support.checkpoints import TinyModel, write_checkpoint

SIZES = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 4, "intermediate": 2048, "vocab": 32000, "context": 2048}
NUM_NEW = 24
TURNS = 7
JOINED = (1, 4, 8)


def ours(stage: StageEngine, ids: np.ndarray, rows: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns (prompt, new) tokens per second of this many sequences that decode together."""

    def step(pos0: int, tokens: list[list[int]], sequences: list[int]) -> list[int]:
        parts = tuple(Row(s, pos0, len(t), 1) for s, t in zip(sequences, tokens, strict=True))
        output = stage.forward(StageInput(parts, tuple(i for part in tokens for i in part), {}))
        assert output.logits is not None
        return [int(i) for i in output.logits.argmax(1)]

    sequences = list(range(1, rows + 1))
    for sequence in sequences:
        stage.insert(sequence, len(ids) + NUM_NEW + 1)
    begin = clock()
    new = [step(0, [ids.tolist()], [sequence])[0] for sequence in sequences]
    middle = clock()
    for i in range(NUM_NEW):
        new = step(len(ids) + i, [[token] for token in new], sequences)
    end = clock()
    for sequence in sequences:
        stage.remove(sequence)
    return rows * len(ids) / (middle - begin), rows * NUM_NEW / (end - middle)


class _Times:
    """A streamer that only records the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.at: list[float] = []

    def put(self, _value: Any) -> None:
        self.at.append(self._clock())

    def end(self) -> None:
        """Does nothing."""


def theirs(model: Any, ids: np.ndarray, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns (prompt, new) tokens per second of transformers' forward and generate."""
    tokens = torch.from_numpy(ids[None].astype(np.int64))
    times = _Times(clock)
    with torch.inference_mode():
        begin = clock()
        model(tokens, logits_to_keep=1)
        end = clock()
        mask = torch.ones_like(tokens)
        settings = {"max_new_tokens": NUM_NEW + 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(tokens, attention_mask=mask, streamer=times, **settings)
    # the prompt comes first, then the token from its forward
    return len(ids) / (end - begin), NUM_NEW / (times.at[-1] - times.at[1])


def main(argv: list[str]) -> int:
    dtype, threads, prompt = (*argv, *("bfloat16", "1", "128")[len(argv) :])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    clock = time.thread_time if threads == "1" else time.perf_counter
    ids = np.random.default_rng(0).integers(0, SIZES["vocab"], int(prompt)).astype(np.int32)
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), TinyModel("llama", dtype=dtype, **SIZES))
        stage = provider.create()
        request = LoadRequest(Shard("m", 0, 12, 12), path, 2048, {"dtype": dtype, "threads": threads})
        stage.load(request, lambda done, total: None)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # out of the mapped file, into memory like our engine's
    ours(stage, ids, 1, clock), theirs(model, ids, clock)
    turns = [(*ours(stage, ids, 1, clock), *theirs(model, ids, clock)) for _ in range(TURNS)]
    prefill, decode, their_prefill, their_decode = np.median(turns, 0)
    print(f"{dtype}, {threads} threads, prompt of {prompt}: prefill {prefill:.0f} and decode {decode:.1f} tokens/s")
    print(f"transformers: {their_prefill:.0f} and {their_decode:.1f}", end="; ")
    print(f"ratios {prefill / their_prefill:.3f} and {decode / their_decode:.3f}")
    for rows in JOINED:
        speeds = [ours(stage, ids, rows, clock)[1] for _ in range(3)]
        print(f"{rows} sequences at once: {np.median(speeds):.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
