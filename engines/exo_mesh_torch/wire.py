"""What goes into a forward and comes out: the engine-neutral tensors that travel between stages, and rows of frames."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from exo_mesh.domain.frame import Row
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


def compute_by_token(
    compute: Callable[..., None],
    is_last: bool,
    group: Sequence[int],
    rows: Sequence[Row],
    starts: Sequence[int],
    token_ids: Sequence[int],
    hidden: torch.Tensor | None,
    results: list[torch.Tensor | None],
) -> None:
    """As `compute`, which takes the other arguments but is_last, one token of each row after the other: some model code
    begins longer rows with empty states. The rows of the group are equally long."""
    parts: dict[int, list[torch.Tensor]] = {i: [] for i in group}
    for at in range(rows[group[0]].n):
        places = [starts[i] + at for i in group]
        singles = [_token(rows[i], at) for i in group]
        given = None if hidden is None else hidden[places]
        found: list[torch.Tensor | None] = [None] * len(group)
        ids = [token_ids[place] for place in places]
        compute(range(len(group)), singles, range(len(group) + 1), ids, given, found)
        for i, single, values in zip(group, singles, found, strict=True):
            if values is not None and (not is_last or single.num_logits or single.num_hidden):
                parts[i].append(values)
    for i in group:
        results[i] = torch.cat(parts[i]) if parts[i] else None


def _token(row: Row, at: int) -> Row:
    """One token of a row as a row."""
    left = row.n - at
    return Row(row.sequence, row.pos0 + at, 1, int(left <= row.num_logits), int(left <= row.num_hidden))


def states_of(rows: Sequence[Row], results: Sequence[torch.Tensor | None]) -> np.ndarray | None:
    """Float32 `[sum(num_hidden), width]`, with zeros for rows that were not computed; None if no row wants states."""
    wanted = [(row, result) for row, result in zip(rows, results, strict=True) if row.num_hidden]
    width = next((result.shape[-1] for _, result in wanted if result is not None), 1)
    zeros = torch.zeros((1, width))
    parts = [
        zeros.expand(row.num_hidden, -1) if result is None else result[-row.num_hidden :].float().cpu()
        for row, result in wanted
    ]
    return torch.cat(parts).numpy() if parts else None


def rows_of(hidden: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """`[tokens, …]` -> `[rows, n, …]` of the spans, which are equally long; without a copy if they follow each
    other."""
    (first, stop), n = spans[0], spans[0][1] - spans[0][0]
    if all(span == (first + i * n, stop + i * n) for i, span in enumerate(spans)):
        return hidden[first : first + n * len(spans)].unflatten(0, (len(spans), n))
    return torch.stack([hidden[begin:end] for begin, end in spans])
