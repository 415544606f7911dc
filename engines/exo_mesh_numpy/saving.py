"""Copy the KV of a sequence out of a stage, and in again."""

from __future__ import annotations

import numpy as np

from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.errors import EngineError
from exo_mesh_numpy.kv import SequenceKv

_NAMES = ("keys", "values")


def save(kv: SequenceKv) -> SavedSequence:
    """Tensors "keys" and "values", float32 `[layers, kv_heads, length, head_dim]`."""
    stacked = (np.stack([array[:, : kv.length] for array in arrays]) for arrays in (kv.keys, kv.values))
    tensors = {name: Tensor.from_numpy(array) for name, array in zip(_NAMES, stacked, strict=True)}
    return SavedSequence(kv.length, tensors)


def restore(kv: SequenceKv, saved: SavedSequence) -> None:
    """Fill the KV of a new sequence. Raises EngineError, before anything is changed, if the tensors do not fit."""
    num_heads, _, head_dim = kv.keys[0].shape
    shape = (len(kv.keys), num_heads, saved.length, head_dim)
    if not 0 <= saved.length <= kv.max_tokens:
        raise EngineError(f"{saved.length} saved positions do not fit a sequence of at most {kv.max_tokens}")
    for name in _NAMES:
        tensor = saved.tensors.get(name)
        if tensor is None or tensor.dtype != "float32" or tensor.shape != shape:
            what = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
            raise EngineError(f"saved {name} do not fit this stage: expected float32{list(shape)}, got {what}")
    if surplus := sorted(saved.tensors.keys() - set(_NAMES)):
        raise EngineError(f"saved {surplus[0]!r} is of another stage: this one has {' and '.join(_NAMES)}")
    kv.reserve(saved.length)
    for name, arrays in zip(_NAMES, (kv.keys, kv.values), strict=True):
        for array, layer in zip(arrays, saved.tensors[name].numpy(), strict=True):
            array[:, : saved.length] = layer
    kv.length = saved.length
