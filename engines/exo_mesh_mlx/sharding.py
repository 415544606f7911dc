"""Splits a model over the ranks of a tensor group by mlx-lm's own `shard()`, and records each rank's share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten, tree_map

from exo_mesh.errors import ModelError
from exo_mesh_mlx.ranks import Ranks


class RankShares(msgspec.Struct, frozen=True):
    """Bytes of this rank's layer tensors by name: split tensors, and tensors that every rank holds whole. full_bytes:
    bytes of the split tensors on all ranks together."""

    split: Mapping[str, int] = msgspec.field(default_factory=dict)
    whole: Mapping[str, int] = msgspec.field(default_factory=dict)
    full_bytes: int = 0

    def describe(self) -> str:
        """One sentence, with the kinds of tensors that are whole."""
        kinds = sorted({re.sub(r"^\d+\.", "", name) for name in self.whole})
        return (
            f"{sum(self.split.values())} of {self.full_bytes} bytes of split tensors; "
            f"{sum(self.whole.values())} bytes whole on every rank: {', '.join(kinds) or 'none'}"
        )


def share_out(model: nn.Module, ranks: Ranks, start: int, stop: int) -> RankShares:
    """Split the model in place, lazily. Returns this rank's share of layers `[start, stop)`. Raises ModelError if
    mlx-lm cannot split the model."""
    before = _layer_bytes(model, start, stop)
    shard = getattr(model, "shard", None)
    if shard is None:
        raise ModelError(f"mlx-lm cannot split {type(model).__module__} over {ranks.size} ranks: it has no shard()")
    try:
        shard(ranks.group)
    except Exception as exc:  # model code may raise anything for a size that it cannot split
        raise ModelError(f"the model cannot be split over {ranks.size} ranks: {exc}") from exc
    for layer in model.layers[start:stop]:
        # a slice would keep the whole tensor that it is a view of
        layer.update(tree_map(_own, layer.parameters()))
    after = _layer_bytes(model, start, stop)
    split = {name: size for name, size in after.items() if before.get(name) != size}
    whole = {name: size for name, size in after.items() if name not in split}
    return RankShares(split, whole, sum(size for name, size in before.items() if name not in whole))


def _own(value: Any) -> Any:
    return mx.contiguous(value) if isinstance(value, mx.array) else value


def _layer_bytes(model: Any, start: int, stop: int) -> dict[str, int]:
    """{"3.mlp.up_proj.weight": bytes} of layers `[start, stop)`."""
    return {
        f"{index}.{name}": array.nbytes
        for index, layer in enumerate(model.layers[start:stop], start)
        for name, array in tree_flatten(layer.parameters())
    }


def coarsest_dtype(model: Any) -> str:
    """The floating dtype of the layers' parameters with the fewest digits."""
    digits = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}
    found = {array.dtype for layer in model.layers for _, array in tree_flatten(layer.parameters())}
    return next((name for dtype, name in digits.items() if dtype in found), "float32")
