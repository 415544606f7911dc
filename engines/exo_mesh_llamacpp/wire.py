"""Converts float32 rows to and from the engine-neutral Tensor that travels between stages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from exo_mesh.domain.frame import HIDDEN
from exo_mesh.domain.tensor import Tensor
from exo_mesh.errors import EngineError

ACTIVATION_DTYPES = ("float32", "float16", "bfloat16")


def received(tensors: Mapping[str, Tensor], num_tokens: int, width: int) -> np.ndarray:
    """The main tensor as float32 `[num_tokens, width]`. Raises EngineError if it is missing or does not fit."""
    tensor = tensors.get(HIDDEN)
    if tensor is None or tensor.dtype not in ACTIVATION_DTYPES or tensor.shape != (num_tokens, width):
        what = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
        known = ", ".join(ACTIVATION_DTYPES)
        raise EngineError(f"expected activations [{num_tokens}, {width}] of {known}, got {what}")
    return widened(tensor.numpy(), tensor.dtype)


def to_tensor(rows: np.ndarray, dtype: str) -> Tensor:
    """float32 rows as a tensor of one of ACTIVATION_DTYPES; without a copy as float32."""
    if dtype == "bfloat16":
        return Tensor(dtype, rows.shape, narrowed_to_bfloat16(rows).reshape(-1).view(np.uint8).data)
    return Tensor.from_numpy(rows.astype(dtype, copy=False))


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 copies of values; bfloat16 comes as its bits in uint16. float32 is returned as it is."""
    if dtype == "bfloat16":
        wide: np.ndarray = (values.astype(np.uint32) << 16).view(np.float32)
        return wide
    return values.astype(np.float32, copy=False)


def narrowed_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values as bfloat16, rounded to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
