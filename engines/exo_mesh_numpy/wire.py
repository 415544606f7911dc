"""Converts float32 rows to and from the engine-neutral Tensor that travels between stages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from exo_mesh.domain.frame import HIDDEN
from exo_mesh.domain.tensor import Tensor
from exo_mesh.errors import EngineError
from exo_mesh_numpy.floats import narrow_to_bfloat16, widen_bfloat16

ACTIVATION_DTYPES = ("float32", "float16", "bfloat16")


def received(tensors: Mapping[str, Tensor], num_tokens: int, width: int) -> Tensor:
    """The main tensor, checked. Raises EngineError if it is missing or does not fit."""
    tensor = tensors.get(HIDDEN)
    if tensor is None or tensor.dtype not in ACTIVATION_DTYPES or tensor.shape != (num_tokens, width):
        what = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
        known = ", ".join(ACTIVATION_DTYPES)
        raise EngineError(f"expected activations [{num_tokens}, {width}] of {known}, got {what}")
    return tensor


def read_rows(tensor: Tensor, begin: int, out: np.ndarray) -> None:
    """Fill float32 `out` with rows from `begin` on."""
    rows = tensor.numpy()[begin : begin + len(out)]
    if tensor.dtype == "bfloat16":
        widen_bfloat16(rows, out)
    else:
        out[...] = rows


def to_tensor(rows: np.ndarray, dtype: str) -> Tensor:
    """float32 rows as a tensor of one of ACTIVATION_DTYPES; without a copy as float32."""
    if dtype == "bfloat16":
        return Tensor(dtype, rows.shape, narrow_to_bfloat16(rows).reshape(-1).view(np.uint8).data)
    return Tensor.from_numpy(rows.astype(dtype, copy=False))
