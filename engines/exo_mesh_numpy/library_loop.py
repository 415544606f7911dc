"""NumPy's own matrix products over a model's matrices: what this engine is compared with by `exo-mesh bench engines`.

NumPy has no generate loop, so this is a floor: no norms, no attention, no choice of a token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest
from exo_mesh.engine.measure import Generation, Loop
from exo_mesh_numpy.bench import floor_of
from exo_mesh_numpy.engine import NumpyStage
from exo_mesh_numpy.model_config import read_model_config


def open_loop(model_dir: Path, options: Mapping[str, str]) -> Loop:
    """Load the whole model; a step of the loop multiplies one row with each of its matrices."""
    num_layers = read_model_config(model_dir).num_layers
    stage = NumpyStage()
    shard = Shard(model_dir.name, 0, num_layers, num_layers)
    stage.load(LoadRequest(shard, model_dir, 4096, options), lambda done, total: None)
    weights = stage.weights
    step = floor_of(weights, 1)

    def loop(prompt: Sequence[int], num_steps: int) -> Generation:
        prefill = floor_of(weights, len(prompt), head_rows=1)
        begin = time.perf_counter()
        prefill()
        first = time.perf_counter()
        for _ in range(num_steps):
            step()
        return Generation(first - begin, time.perf_counter() - first, num_steps)

    return loop
