"""A plain greedy loop with NumPy, with which `exo-mesh bench engines` compares this engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest
from exo_mesh.engine.measure import Loop, TimedGeneration
from exo_mesh_numpy.engine import NumpyStage
from exo_mesh_numpy.model_config import read_model_config
from exo_mesh_numpy.plain import PlainLoop


def open_loop(model_dir: Path, options: Mapping[str, str]) -> Loop:
    """Load the whole model. The loop runs one sequence at a time, for a plain Llama as in textbooks."""
    config = read_model_config(model_dir)
    stage = NumpyStage()
    shard = Shard(model_dir.name, 0, config.num_layers, config.num_layers)
    stage.load(LoadRequest(shard, model_dir, 4096, options), lambda done, total: None)

    def loop(prompt: Sequence[int], num_steps: int) -> TimedGeneration:
        plain = PlainLoop(config, stage.weights, len(prompt) + num_steps)
        begin = time.perf_counter()
        token = plain.forward(np.array(prompt), 0).argmax()
        first = time.perf_counter()
        for pos0 in range(len(prompt), len(prompt) + num_steps):
            token = plain.forward(np.array([token]), pos0).argmax()
        return TimedGeneration(first - begin, time.perf_counter() - first, num_steps)

    return loop
