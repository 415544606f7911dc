"""Decides where a model may be cut: where the trace allows it and both halves run."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from exo_mesh_mlx.caches import SequenceCache, plan_caches
from exo_mesh_mlx.ghost import MlxGhostStage, Packet
from exo_mesh_mlx.trace import MlxTrace

DRY_RUN_TOKENS = (3, 2, 1)
"""A prompt in two chunks and a decode step: many models make no mask for a first chunk or for a single token."""


def why_not(model: nn.Module, trace: MlxTrace, cut: int) -> str:
    """The reason why no stage may begin at layer `cut`, or "" if one may. Builds graphs, computes nothing."""
    return trace.why_illegal(cut) or _why_halves_fail(model, trace, cut)


def why_a_range_fails(start: int, stop: int, num_layers: int, exc: Exception) -> str:
    """A sentence for users about layers `[start, stop)` whose forward pass failed."""
    detail = f"({type(exc).__name__}: {' '.join(str(exc).split())[:300]})"
    if (start, stop) == (0, num_layers):
        return f"mlx-lm's code cannot run the model that config.json describes {detail}"
    return f"layers {start} to {stop - 1} cannot run by themselves, because they use data of other layers {detail}"


def _why_halves_fail(model: nn.Module, trace: MlxTrace, cut: int) -> str:
    """The reason why one half cannot build its graph, or "". A half fails if model code between the layers needs a
    cache of the other half."""
    packets: list[Packet] = [{} for _ in DRY_RUN_TOKENS]
    for start, stop in ((0, cut), (cut, trace.num_layers)):
        full = make_prompt_cache(model)
        cache = SequenceCache(full, plan_caches(trace, full, start, stop))
        stage = MlxGhostStage(model, trace, start, stop)
        try:
            for i, num_tokens in enumerate(DRY_RUN_TOKENS):
                result = stage.forward(mx.zeros((1, num_tokens), mx.int32), cache.full, packets[i], 1)
                cache.advance(num_tokens)
                packets[i] = {} if isinstance(result, mx.array) else result
        except Exception as exc:  # noqa: BLE001 - model code may raise anything on a cut that it was not written for
            return why_a_range_fails(start, stop, trace.num_layers, exc)
        finally:
            stage.close()
    return ""
