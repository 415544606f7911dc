"""Finds the parameters that a lazy result depends on, from MLX's own graph: they will be read when it is evaluated."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from exo_mesh_mlx import packets
from exo_mesh_mlx.caches import SequenceCache, plan_caches
from exo_mesh_mlx.ghost import MlxGhostStage
from exo_mesh_mlx.trace import MlxTrace

_USED = re.compile(r'"p(\d+)" ->')


def reached(results: list[mx.array], parameters: Mapping[str, mx.array]) -> set[str]:
    """Names of the parameters from which some unevaluated result is computed. Computes nothing."""
    labels = {f"p{i}": array for i, array in enumerate(parameters.values())}
    graph = io.StringIO()
    mx.export_to_dot(graph, *results, **labels)
    used = {int(number) for number in _USED.findall(graph.getvalue())}
    return {name for i, name in enumerate(parameters) if i in used}


def graph_of_stage(model: nn.Module, trace: MlxTrace, start: int, stop: int) -> list[mx.array]:
    """All results that a stage would evaluate in one forward of one token, lazily. The model is not hooked
    afterwards."""
    stage = MlxGhostStage(model, trace, start, stop)
    full = make_prompt_cache(model)
    cache = SequenceCache(full, plan_caches(trace, full, start, stop))
    try:
        result = stage.forward(mx.zeros((1, 1), mx.int32), cache.full, packets.zeros(stage.inputs), 1)
    finally:
        stage.close()
    cache.advance(1)
    return [*([result] if isinstance(result, mx.array) else result.values()), *cache.arrays()]
