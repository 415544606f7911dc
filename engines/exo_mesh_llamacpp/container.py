"""Writes the beginning of a GGUF file: metadata, and the places of tensors. Pure.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgspec

from exo_mesh_llamacpp.types import GgmlType

ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10

Value = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float]
Metadata = Mapping[str, Value]


class Placed(msgspec.Struct, frozen=True):
    """A tensor and where its bytes begin, counted from the start of the file. shape: the length of a row first."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return self.kind.num_bytes(self.shape)


def lay_out(
    metadata: Metadata, tensors: Sequence[tuple[str, GgmlType, tuple[int, ...]]]
) -> tuple[bytes, list[Placed], int]:
    """(first bytes of the file, the places of the tensors, bytes of the whole file)."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_string(key) + _value(value) for key, value in metadata.items()]
    offset, offsets = 0, []
    for name, kind, shape in tensors:
        head.append(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind.number, offset))
        offsets.append(offset)
        offset = _aligned(offset + kind.num_bytes(shape))
    raw = b"".join(head)
    raw += bytes(_aligned(len(raw)) - len(raw))
    placed = [Placed(*tensor, len(raw) + start) for tensor, start in zip(tensors, offsets, strict=True)]
    return raw, placed, len(raw) + offset


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool | int | float):
        kind, form = _form((value,))
        return struct.pack(f"<I{form}", kind, value)
    kind, form = _form(value)
    return struct.pack(f"<IIQ{len(value)}{form}", _ARRAY, kind, len(value), *value)


def _form(values: Sequence[bool | int | float]) -> tuple[int, str]:
    """The type of a value or of all values of an array, and its struct format."""
    if all(isinstance(value, bool) for value in values):
        return _BOOL, "?"
    if all(isinstance(value, int) for value in values):
        if min(values) < 0:
            return _INT32, "i"
        return (_UINT32, "I") if max(values) < 2**32 else (_UINT64, "Q")
    return _FLOAT32, "f"
