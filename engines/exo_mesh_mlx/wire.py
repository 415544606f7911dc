"""Converts mx.array to and from the engine-neutral Tensor that travels between stages."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from exo_mesh.domain.tensor import Tensor

MX_DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int32": mx.int32,
    "uint32": mx.uint32,
    "int64": mx.int64,
    "uint8": mx.uint8,
    "bool": mx.bool_,
}

ACTIVATION_DTYPES = ("float32", "float16", "bfloat16")


def dtype_name(dtype: mx.Dtype) -> str:
    """Name of an MLX dtype as in ITEM_BYTES; ValueError if it cannot cross a hop."""
    for name, known in MX_DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"{dtype} cannot cross a hop")


def to_tensor(array: mx.array) -> Tensor:
    """Copy an evaluated array out of MLX. NumPy has no bfloat16, so bfloat16 is copied as its bits."""
    if array.dtype != mx.bfloat16:
        return Tensor.from_numpy(np.array(array))
    bits = Tensor.from_numpy(np.array(array.view(mx.uint16)).view(np.uint8))
    return Tensor("bfloat16", tuple(array.shape), bits.data)


def from_tensor(tensor: Tensor) -> mx.array:
    """Copy a tensor into MLX, in its own dtype."""
    array = mx.array(tensor.numpy())
    return array.view(mx.bfloat16) if tensor.dtype == "bfloat16" else array
