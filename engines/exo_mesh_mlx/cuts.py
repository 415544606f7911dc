"""Where a model may be cut: what the trace allows, less the cuts at which one of the halves does not run."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from exo_mesh_mlx.caches import SequenceCache, plan_caches
from exo_mesh_mlx.ghost import GhostStage, Packet
from exo_mesh_mlx.loading import Checkpoint, build_model, trace_checkpoint
from exo_mesh_mlx.trace import Trace

DRY_RUN_TOKENS = (3, 1)
"""A prefill and a decode step."""


def legal_cuts(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Layers before which a stage may begin. Reads headers, computes nothing. Raises ModelError for a looped model."""
    trace = trace_checkpoint(checkpoint)
    model = build_model(checkpoint)
    return tuple(cut for cut in trace.legal_cuts() if _halves_run(model, trace, cut))


def _halves_run(model: nn.Module, trace: Trace, cut: int) -> bool:
    """Do both halves build their graphs? Not if model code between the layers needs a cache that lies elsewhere."""
    packets: list[Packet] = [{} for _ in DRY_RUN_TOKENS]
    for start, stop in ((0, cut), (cut, trace.num_layers)):
        full = make_prompt_cache(model)
        cache = SequenceCache(full, plan_caches(trace, full, start, stop))
        stage = GhostStage(model, trace, start, stop)
        for i, num_tokens in enumerate(DRY_RUN_TOKENS):
            try:
                result = stage.forward(mx.zeros((1, num_tokens), mx.int32), cache, packets[i], 1)
            except Exception:  # noqa: BLE001 - model code may fail in any way on a cut that it was not written for
                return False
            packets[i] = {} if isinstance(result, mx.array) else result
        stage.close()
    return True
