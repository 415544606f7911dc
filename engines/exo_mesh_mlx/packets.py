"""Converts live values of rows to and from the tensors of a frame: `[sum(n), width]`, tokens in row order.

A value without a token axis, one per row, is repeated for each token of its row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import msgspec

from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import TensorSpec
from exo_mesh.errors import EngineError
from exo_mesh_mlx import wire
from exo_mesh_mlx.ghost import Packet
from exo_mesh_mlx.trace import LiveValue


class Group(msgspec.Struct, frozen=True):
    """Rows of a frame that are computed in one forward. rows: their indexes, rising; n: tokens of each."""

    rows: tuple[int, ...]
    n: int


def specs(values: Sequence[LiveValue], dtype: str = "") -> tuple[TensorSpec, ...]:
    """The tensors that cross the cut, as a stage declares them. dtype: of floating values, "" for the dtype that the
    layer returned."""
    return tuple(
        TensorSpec(value.key, dtype if dtype and value.is_floating else wire.dtype_name(value.dtype), (_width(value),))
        for value in values
    )


def pack(
    values: Sequence[LiveValue], groups: Sequence[tuple[Group, Packet]], sizes: Sequence[int], dtype: str = ""
) -> dict[str, mx.array]:
    """Lazy wire arrays of all rows, in row order. Rows of no group get zeros; sizes[i]: tokens of row i."""
    packed: dict[str, mx.array] = {}
    for value in values:
        lines = _all_lines(value, groups, sizes)
        packed[value.key] = lines.astype(wire.MX_DTYPES[dtype]) if dtype and value.is_floating else lines
    return packed


def unpack(
    values: Sequence[LiveValue], tensors: Mapping[str, Tensor], groups: Sequence[Group], sizes: Sequence[int]
) -> list[Packet]:
    """One packet per group, in the dtype that this stage's layers expect. Raises EngineError if the frame is wrong."""
    packets: list[Packet] = [{} for _ in groups]
    for value in values:
        tensor = tensors.get(value.key)
        if tensor is None:
            raise EngineError(f"the frame lacks tensor {json.dumps(value.key)}; it has {json.dumps(sorted(tensors))}")
        expected = (sum(sizes), _width(value))
        if tensor.shape != expected:
            raise EngineError(
                f"tensor {json.dumps(value.key)} has shape {list(tensor.shape)}, expected {list(expected)}"
            )
        array = wire.from_tensor(tensor)
        array = array if array.dtype == value.dtype else array.astype(value.dtype)
        for packet, group in zip(packets, groups, strict=True):
            packet[value.source] = _unflatten(value, _lines_of(array, group, sizes), group)
    return packets


def rearranged(packet: Packet, change: Callable[[mx.array], mx.array]) -> Packet:
    """A packet after a change of the order of its rows."""
    return {source: change(array) for source, array in packet.items()}


def zeros(values: Sequence[LiveValue], num_rows: int = 1, n: int = 1) -> Packet:
    """Zeros in place of the values of earlier stages, for rows of n tokens each."""
    made: Packet = {}
    for value in values:
        shape = [n if axis == value.token_axis else size for axis, size in enumerate(value.shape)]
        made[value.source] = mx.zeros([num_rows, *shape[1:]] if value.has_batch_axis else shape, value.dtype)
    return made


def to_tensors(packed: Mapping[str, mx.array]) -> dict[str, Tensor]:
    """Copy evaluated wire arrays out of MLX."""
    return {key: wire.to_tensor(array) for key, array in packed.items()}


def _all_lines(value: LiveValue, groups: Sequence[tuple[Group, Packet]], sizes: Sequence[int]) -> mx.array:
    """`[tokens, width]` of all rows in row order."""
    flat = [_flatten(value, packet[value.source], group) for group, packet in groups]
    if len(groups) == 1 and len(groups[0][0].rows) == len(sizes):
        return flat[0]
    dtype = flat[0].dtype if flat else value.dtype
    parts = [mx.zeros((n, _width(value)), dtype) for n in sizes]
    for (group, _), lines in zip(groups, flat, strict=True):
        for place, row in enumerate(group.rows):
            parts[row] = lines[place * group.n : (place + 1) * group.n]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _lines_of(array: mx.array, group: Group, sizes: Sequence[int]) -> mx.array:
    """The lines of a group's rows."""
    if group.n * len(group.rows) == array.shape[0]:
        return array
    begins = [sum(sizes[:row]) for row in group.rows]
    parts = [array[begin : begin + group.n] for begin in begins]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _width(value: LiveValue) -> int:
    return math.prod(value.shape)


def _flatten(value: LiveValue, array: mx.array, group: Group) -> mx.array:
    """`[rows, .., n, ..]` -> `[rows * n, width]`; one row alone may be of any shape."""
    width = _width(value)
    if value.token_axis is None:
        lines = array.reshape(len(group.rows), 1, width)
        return mx.broadcast_to(lines, (len(group.rows), group.n, width)).reshape(-1, width)
    tokens_at = 1 if value.has_batch_axis else 0
    return mx.moveaxis(array, value.token_axis, tokens_at).reshape(-1, width)


def _unflatten(value: LiveValue, lines: mx.array, group: Group) -> mx.array:
    """`[rows * n, width]` -> the shape that the layer returned."""
    if value.token_axis is None:
        first = lines.reshape(len(group.rows), group.n, -1)[:, 0]
        return first.reshape((len(group.rows), *value.shape[1:]) if value.has_batch_axis else value.shape)
    before = (0,) if value.has_batch_axis else ()
    rest = [size for axis, size in enumerate(value.shape) if axis not in (*before, value.token_axis)]
    lead = (len(group.rows), group.n) if value.has_batch_axis else (group.n,)
    return mx.moveaxis(lines.reshape(*lead, *rest), len(before), value.token_axis)
