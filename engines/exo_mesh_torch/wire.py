"""Converts torch.Tensor to and from the engine-neutral Tensor that travels between stages."""

from __future__ import annotations

import json
import math

import torch

from exo_mesh.domain.tensor import Tensor
from exo_mesh.errors import EngineError

ACTIVATION_DTYPES = ("float32", "float16", "bfloat16")

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in frames. Raises EngineError if it cannot cross a hop."""
    for name, known in _DTYPES.items():
        if known == dtype:
            return name
    raise EngineError(f"{dtype} cannot cross a hop")


def to_tensor(tensor: torch.Tensor) -> Tensor:
    """Copy to the CPU; no copy if the tensor is there and contiguous, so it must not be changed afterwards."""
    name, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if not tensor.numel():
        return Tensor(name, shape, b"")
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return Tensor(name, shape, flat.numpy().data)


def from_tensor(tensor: Tensor, device: torch.device, *, borrows: bool = False) -> torch.Tensor:
    """A tensor on `device`, in its own dtype. borrows: it may share the memory of `tensor`, and must not be changed
    then. Raises EngineError for a dtype that torch does not have."""
    if tensor.dtype not in _DTYPES:
        raise EngineError(f"torch has no dtype {tensor.dtype}")
    if not math.prod(tensor.shape):
        return torch.zeros(tensor.shape, dtype=_DTYPES[tensor.dtype], device=device)
    has_own = not borrows or memoryview(tensor.data).readonly  # torch warns of memory that it must not change
    data = torch.frombuffer(bytearray(tensor.data) if has_own else tensor.data, dtype=torch.uint8)
    return data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape).to(device)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name. Raises EngineError for a dtype that activations cannot have."""
    if name not in ACTIVATION_DTYPES:
        raise EngineError(f"activations cannot have dtype {json.dumps(name)}; known: {', '.join(ACTIVATION_DTYPES)}")
    return _DTYPES[name]
