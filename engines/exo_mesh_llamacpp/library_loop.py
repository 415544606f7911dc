"""llama.cpp's own loop over a whole model, with which `exo-mesh bench engines` compares this engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from exo_mesh.engine.measure import Loop, TimedGeneration
from exo_mesh_llamacpp.context import LlamaContext
from exo_mesh_llamacpp.library import open_library
from exo_mesh_llamacpp.library_file import chosen_library
from exo_mesh_llamacpp.options import parse_options
from exo_mesh_llamacpp.source import open_source
from exo_mesh_llamacpp.whole import PlainModel

CELLS = 4352
"""Positions of the context: a prompt of 4,096 tokens and as many steps as `bench engines` makes."""


def open_loop(model_dir: Path, options: Mapping[str, str]) -> Loop:
    """Load the whole model with token ids in and the same types as the engine, which runs one sequence at a time."""
    parsed = parse_options(options)
    library = open_library(chosen_library(options))
    model = PlainModel(library, open_source(model_dir, parsed, lambda: library), parsed)
    context = model.context(1, CELLS)

    def loop(prompt: Sequence[int], num_steps: int) -> TimedGeneration:
        context.cut(0, 0)
        begin = time.perf_counter()
        token = feed(context, model.tokens, prompt)
        first = time.perf_counter()
        for pos0 in range(len(prompt), len(prompt) + num_steps):
            token = feed(context, model.tokens, (token,), pos0)
        return TimedGeneration(first - begin, time.perf_counter() - first, num_steps)

    return loop


def feed(context: LlamaContext, tokens: np.ndarray, ids: Sequence[int], pos0: int = 0) -> int:
    """Compute token ids of one sequence; returns the most likely next token. tokens: where the context takes ids."""
    best = 0
    for begin in range(0, len(ids), context.max_tokens):
        part = ids[begin : begin + context.max_tokens]
        count = len(part)
        tokens[:count] = part
        context.positions[:count] = np.arange(pos0 + begin, pos0 + begin + count)
        context.sequences[:count] = 0
        context.wanted[:count] = 0
        context.wanted[count - 1] = begin + count == len(ids)
        logits = context.decode(count)
        best = int(logits[0].argmax()) if logits is not None and len(logits) else 0
    return best
