"""Live values of rows <-> the tensors of a frame: `[sum(n), width]`, or `[rows, width]` without a token axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import mlx.core as mx

from exo_mesh.domain.tensor import Tensor
from exo_mesh.errors import EngineError
from exo_mesh_mlx import wire
from exo_mesh_mlx.ghost import Packet
from exo_mesh_mlx.trace import LiveValue


def pack(values: Sequence[LiveValue], rows: Sequence[Packet | None], sizes: Sequence[int]) -> dict[str, mx.array]:
    """Lazy wire arrays of all rows, in row order. A row of None gets zeros; sizes[i]: tokens of row i."""
    packed: dict[str, mx.array] = {}
    for value in values:
        dtype = next((row[value.source].dtype for row in rows if row), value.dtype)
        parts = [
            _flatten(value, row[value.source]) if row else mx.zeros((_num_lines(value, n), _width(value)), dtype)
            for row, n in zip(rows, sizes, strict=True)
        ]
        packed[value.key] = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return packed


def unpack(values: Sequence[LiveValue], tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> list[Packet]:
    """One packet per row, in the dtype that this stage's layers expect. Raises EngineError if the frame is wrong."""
    rows: list[Packet] = [{} for _ in sizes]
    for value in values:
        tensor = tensors.get(value.key)
        if tensor is None:
            raise EngineError(f"the frame lacks tensor {value.key!r}; it has {sorted(tensors)}")
        expected = (sum(_num_lines(value, n) for n in sizes), _width(value))
        if tensor.shape != expected:
            raise EngineError(f"tensor {value.key!r} has shape {tensor.shape}, expected {expected}")
        array = wire.from_tensor(tensor)
        array = array if array.dtype == value.dtype else array.astype(value.dtype)
        begin = 0
        for row, n in zip(rows, sizes, strict=True):
            end = begin + _num_lines(value, n)
            row[value.source] = _unflatten(value, array[begin:end], n)
            begin = end
    return rows


def _num_lines(value: LiveValue, num_tokens: int) -> int:
    return 1 if value.token_axis is None else num_tokens


def _width(value: LiveValue) -> int:
    return math.prod(value.shape)


def _flatten(value: LiveValue, array: mx.array) -> mx.array:
    """`[.., n, ..]` -> `[n, width]`."""
    if value.token_axis is None:
        return array.reshape(1, -1)
    return mx.moveaxis(array, value.token_axis, 0).reshape(array.shape[value.token_axis], -1)


def _unflatten(value: LiveValue, lines: mx.array, num_tokens: int) -> mx.array:
    """`[n, width]` -> the shape that the layer returned."""
    if value.token_axis is None:
        return lines.reshape(value.shape)
    rest = [size for axis, size in enumerate(value.shape) if axis != value.token_axis]
    return mx.moveaxis(lines.reshape(num_tokens, *rest), 0, value.token_axis)
