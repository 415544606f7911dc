"""Surveys a model for placement: where it may be cut, and the bytes of each layer. Reads headers, computes nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from exo_mesh.engine.contract import ModelSurvey
from exo_mesh.errors import ModelError
from exo_mesh_mlx.caches import cache_kind
from exo_mesh_mlx.checkpoint import MlxCheckpoint
from exo_mesh_mlx.cuts import why_a_range_fails, why_not
from exo_mesh_mlx.kv import kv_bytes, kv_kinds
from exo_mesh_mlx.loading import build_model, graph_of_stage, reached, trace_checkpoint
from exo_mesh_mlx.trace import MlxTrace

LONG_RUN_TOKENS = 128
"""Tokens of the lazy run after which caches are measured: a multiple of the groups of positions that caches
compress."""

SHORT_RUN_TOKENS = 3
"""Tokens of the lazy run that shows whether a model runs at all."""

_PLACE = re.compile(r"(idx|index|layer_id|layer_num\w*)$")
"""Settings of a layer that only number it."""


class _Ends(msgspec.Struct, frozen=True):
    """Bytes of the parameters outside the layers that the first and the last stage use."""

    embed: int
    head: int


def survey(checkpoint: MlxCheckpoint) -> ModelSurvey:
    """Survey a checkpoint. Raises ModelError, naming file and tensor or key, for a checkpoint that cannot be run at
    all."""
    model: Any = build_model(checkpoint)
    try:
        trace = trace_checkpoint(checkpoint)
    except ModelError as exc:
        return _one_piece(checkpoint, model, str(exc))
    reasons = {cut: why_not(model, trace, cut) for cut in range(1, trace.num_layers)}
    cuts = tuple(cut for cut, reason in reasons.items() if not reason)
    reason = "" if cuts else next(iter(reasons.values()), "it has one layer")
    caches = _filled_caches(model)
    ends = _ends_of_stages(model, trace, cuts[0]) if cuts else _ends_of_whole(model)
    per_layer = [[caches[slot] for slot in sorted(use.slots)] for use in trace.layers]
    kv = [[kv_bytes(entry, LONG_RUN_TOKENS) for entry in entries] for entries in _owned(per_layer)]
    return ModelSurvey(
        legal_cuts=cuts,
        reason=reason and f"{checkpoint.model_dir}: {reason}",
        layer_bytes=tuple(_num_bytes(layer) for layer in model.layers),
        embed_bytes=ends.embed,
        head_bytes=ends.head,
        kv_bytes_per_token=tuple(sum(per_token for per_token, _ in entries) for entries in kv),
        kv_fixed_bytes=tuple(sum(fixed for _, fixed in entries) for entries in kv),
        layer_kinds=tuple(_layer_kind(layer, entries) for layer, entries in zip(model.layers, per_layer, strict=True)),
    )


def _one_piece(checkpoint: MlxCheckpoint, model: Any, reason: str) -> ModelSurvey:
    """Survey a model whose layers cannot be separated in a forward pass: bytes only. Raises ModelError if its forward
    pass fails without hooks, too."""
    try:
        model(mx.zeros((1, SHORT_RUN_TOKENS), mx.int32), cache=make_prompt_cache(model))
    except Exception as exc:  # model code may raise anything
        why = why_a_range_fails(0, len(model.layers), len(model.layers), exc)
        raise ModelError(f"{checkpoint.config_file}: {why}") from exc
    ends = _ends_of_whole(model)
    sizes = tuple(_num_bytes(layer) for layer in model.layers)
    return ModelSurvey((), reason, layer_bytes=sizes, embed_bytes=ends.embed, head_bytes=ends.head)


def _owned(per_layer: list[list[Any]]) -> Iterator[list[Any]]:
    """For each layer the cache entries that no earlier layer has: a shared entry is kept once."""
    seen: set[int] = set()
    for entries in per_layer:
        yield [entry for entry in entries if id(entry) not in seen]
        seen |= {id(entry) for entry in entries}


def _filled_caches(model: Any) -> list[Any]:
    """Fresh caches after a lazy run, so that they have their shapes."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, LONG_RUN_TOKENS), mx.int32), cache=caches)
    return caches


def _num_bytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _layer_kind(layer: nn.Module, entries: list[Any]) -> str:
    """Class and kinds of KV, and a digest of all shapes, dtypes and settings."""
    tensors = [(name, str(array.dtype), tuple(array.shape)) for name, array in tree_flatten(layer.parameters())]
    settings = [
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str) and not _PLACE.search(key)
    ]
    described = repr((sorted(tensors), sorted(map(repr, settings)), [cache_kind(entry) for entry in entries]))
    kinds = "+".join(kv_kinds(entries)) or "none"
    return f"{type(layer).__name__} {kinds} {hashlib.sha256(described.encode()).hexdigest()[:8]}"


def _outside_layers(model: Any) -> dict[str, mx.array]:
    """Parameters of the model that are in no layer, by name."""
    inside = {id(array) for layer in model.layers for _, array in tree_flatten(layer.parameters())}
    return {name: array for name, array in tree_flatten(model.parameters()) if id(array) not in inside}


def _ends_of_whole(model: Any) -> _Ends:
    """The ends of a model on one stage: everything counts with the head, as a tied table does in any case."""
    return _Ends(0, sum(array.nbytes for array in _outside_layers(model).values()))


def _ends_of_stages(model: nn.Module, trace: MlxTrace, cut: int) -> _Ends:
    """The ends, from the graphs of the two stages that a cut makes."""
    outside = _outside_layers(model)
    first, last = (
        sum(outside[name].nbytes for name in reached(graph_of_stage(model, trace, start, stop), outside))
        for start, stop in ((0, cut), (cut, trace.num_layers))
    )
    return _Ends(first, last)
