"""Makes the bytes of small GGUF files, also of files that are wrong in one place."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

U32, I32, F32, BOOL, TEXT, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_CODES = {U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """shape: in the file's order. offset: None is the right one."""

    name: str
    shape: Sequence[int]
    number: int
    data: bytes
    offset: int | None = None


def text(value: str | bytes, num_bytes: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if num_bytes is None else num_bytes) + raw


def value(kind: int, what: Any) -> bytes:
    """A value of the metadata with its type; what: (type of the elements, elements) for an array."""
    if kind == TEXT:
        return struct.pack("<I", kind) + text(what)
    if kind == ARRAY:
        inner, elements = what
        body = b"".join(text(one) if inner == TEXT else struct.pack(f"<{_CODES[inner]}", one) for one in elements)
        return struct.pack("<IIQ", kind, inner, len(elements)) + body
    return struct.pack("<I", kind) + struct.pack(f"<{_CODES[kind]}", what)


def gguf_bytes(
    entries: Mapping[str, bytes] | Sequence[tuple[str, bytes]] = (),
    tensors: Sequence[RawTensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file. entries: see `value`."""
    pairs = list(entries.items()) if isinstance(entries, Mapping) else list(entries)
    head = magic + struct.pack("<I", version)
    head += struct.pack("<Q", len(tensors) if num_tensors is None else num_tensors)
    head += struct.pack("<Q", len(pairs) if num_entries is None else num_entries)
    head += b"".join(text(key) + body for key, body in pairs)
    data = b""
    for one in tensors:
        offset = len(data) if one.offset is None else one.offset
        head += text(one.name) + struct.pack(f"<I{len(one.shape)}Q", len(one.shape), *one.shape)
        head += struct.pack("<IQ", one.number, offset)
        data += one.data + bytes(-len(one.data) % alignment)
    return head + bytes(-len(head) % alignment) + data
