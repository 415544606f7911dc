"""Copies the KV of a sequence out of a stage, and in again."""

from __future__ import annotations

import json

import numpy as np

from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.errors import EngineError
from exo_mesh_numpy.kv import SequenceKv

_NAMES = ("keys", "values")


def save(kv: SequenceKv) -> SavedSequence:
    """Tensors "keys" and "values", float32 `[layers, kv_heads, length, head_dim]`."""
    stacked = np.stack([kv.values(index, 0, kv.length) for index in range(len(kv.layers))])
    parts = (stacked[:, : kv.num_kv_heads], stacked[:, kv.num_kv_heads :])
    return SavedSequence(kv.length, {name: Tensor.from_numpy(part) for name, part in zip(_NAMES, parts, strict=True)})


def restore(kv: SequenceKv, saved: SavedSequence) -> None:
    """Fill the KV of a new sequence. Raises EngineError, before anything is changed, if the tensors do not fit."""
    shape = (len(kv.layers), kv.num_kv_heads, saved.length, kv.layers[0].shape[-1])
    if not 0 <= saved.length <= kv.max_tokens:
        raise EngineError(f"{saved.length} saved positions do not fit a sequence of at most {kv.max_tokens}")
    for name in _NAMES:
        tensor = saved.tensors.get(name)
        if tensor is None or tensor.dtype != "float32" or tensor.shape != shape:
            what = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
            raise EngineError(f"saved {name} do not fit this stage: expected float32{list(shape)}, got {what}")
    if surplus := sorted(saved.tensors.keys() - set(_NAMES)):
        raise EngineError(f"saved {json.dumps(surplus[0])} is of another stage: this one has {' and '.join(_NAMES)}")
    kv.reserve(saved.length)
    keys, values = (saved.tensors[name].numpy() for name in _NAMES)
    for index, layer in enumerate(kv.layers):
        layer[: kv.num_kv_heads, : saved.length] = keys[index]
        layer[kv.num_kv_heads :, : saved.length] = values[index]
    kv.length = saved.length
