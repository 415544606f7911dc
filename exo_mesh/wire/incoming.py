"""Reads protobuf messages of other peers with limits on their bytes, their items and the characters of each text.

A parsed message takes up to 56 times the memory of its bytes, so its items are counted before it is parsed. Every text
in it is made printable here, by the descriptor of its type, so that no new field can be forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from exo_mesh.base.printable import MAX_CHARS, printable
from exo_mesh.errors import TransportError

MAX_BYTES = 1024 * 1024
"""Longest message of a peer. The largest in a mesh of 200 peers has a fifth of that (docs/how-it-works/scale.md)."""

STRANGER_BYTES = 256 * 1024
"""Longest message of a caller that is not a peer yet: a hello with 1,024 models has about 100 KiB."""

LARGE_BYTES = 64 * 1024
"""Longer messages are processed one at a time."""

BYTES_PER_ITEM = 10
"""A message of n bytes may have n / 10 fields, including nested ones. Real records have 11 bytes per field."""

SMALL_BYTES = 16 * 1024
"""Items of shorter messages are not counted: parsed, such a message takes less than 1 MiB."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_M = TypeVar("_M", bound=Message)


class OversizedError(TransportError):
    """A message is longer, or has more items, than its sender may send."""


class MalformedError(TransportError):
    """Bytes that are not a message of the expected type, or that contradict themselves."""


class _Shape(msgspec.Struct):
    """The fields of a message type by number: which are messages themselves, and which contain texts."""

    inner: dict[int, _Shape] = msgspec.field(default_factory=dict)
    texts: set[int] = msgspec.field(default_factory=set)
    text_maps: set[int] = msgspec.field(default_factory=set)


_shapes: dict[str, _Shape] = {}


def read_message(cls: type[_M], data: bytes, max_bytes: int = MAX_BYTES) -> _M:
    """Parse a message and make its texts printable. Raises OversizedError or MalformedError."""
    name = cls.DESCRIPTOR.name
    if len(data) > max_bytes:
        raise OversizedError(f"a {name} of {len(data)} bytes is longer than the allowed {max_bytes}")
    shape = _shape_of(cls.DESCRIPTOR)
    max_items = max_bytes // BYTES_PER_ITEM
    if len(data) > SMALL_BYTES and has_more_items(data, shape, max_items):
        raise OversizedError(f"a {name} has more than the allowed {max_items} items")
    message = cls()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise MalformedError(f"{len(data)} bytes are not a {name}") from exc
    _make_printable(message, shape)
    return message


def first_text(data: bytes) -> str:
    """Field 1 of an unparsed message, if it comes first and is a text of at most 64 bytes; otherwise ""."""
    if len(data) < 2 or data[0] != 0x0A or data[1] > 64:
        return ""
    return data[2 : 2 + data[1]].decode("utf-8", "replace")


def has_more_items(data: bytes, shape: _Shape, max_items: int) -> bool:
    """Whether the message has more than max_items fields, including nested ones. False for malformed data, which the
    parser refuses without allocating memory."""
    num_items = 0
    parts = [(0, len(data), shape)]
    try:
        while parts:
            at, stop, shape = parts.pop()
            while at < stop:
                num_items += 1
                if num_items > max_items:
                    return True
                key, at = _varint(data, at)
                length, at = _extent(data, at, key & 7)
                if key & 7 == _LENGTH and (inner := shape.inner.get(key >> 3)) is not None:
                    parts.append((at, min(at + length, stop), inner))
                at += length
    except (IndexError, ValueError):
        return False
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, position after it). Raises IndexError at the end of the data, and ValueError after ten bytes."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint has at most ten bytes")


def _extent(data: bytes, at: int, kind: int) -> tuple[int, int]:
    """(length of a field's value, its position). Raises ValueError for groups, which no message of exo-mesh uses."""
    if kind == _LENGTH:
        return _varint(data, at)
    if kind == _VARINT:
        return 0, _varint(data, at)[1]
    if kind in (_FIXED32, _FIXED64):
        return (4 if kind == _FIXED32 else 8), at
    raise ValueError(f"wire type {kind}")


def _shape_of(descriptor: Any) -> _Shape:
    known = _shapes.get(descriptor.full_name)
    if known is not None:
        return known
    shape = _shapes[descriptor.full_name] = _Shape()
    for one in descriptor.fields:
        if one.type == FieldDescriptor.TYPE_STRING:
            shape.texts.add(one.number)
        elif one.message_type is not None:
            shape.inner[one.number] = _shape_of(one.message_type)
            if one.message_type.GetOptions().map_entry:
                shape.text_maps.add(one.number)
    return shape


def _make_printable(message: Message, shape: _Shape) -> None:
    for one, value in message.ListFields():
        number = one.number
        if number in shape.texts:
            _replace_text(message, one.name, value)
        elif number in shape.text_maps:
            _replace_entries(value)
        elif (inner := shape.inner.get(number)) is not None:
            for part in (value,) if isinstance(value, Message) else value:
                _make_printable(part, inner)


def _replace_text(message: Message, name: str, value: Any) -> None:
    """Make the text of a single field, or of each entry of a repeated field, printable."""
    if isinstance(value, str):
        if not _is_fine(value):
            setattr(message, name, printable(value))
        return
    for index, text in enumerate(value):
        if not _is_fine(text):
            value[index] = printable(text)


def _replace_entries(value: Any) -> None:
    """Make the entries of a map printable. Its keys are texts, and its values texts or numbers; no other maps exist."""
    mapping: Mapping[Any, Any] = value
    for key, held in list(mapping.items()):
        if isinstance(held, str) and not _is_fine(held):
            value[key] = held = printable(held)
        if isinstance(key, str) and not _is_fine(key):
            del value[key]
            value[printable(key)] = held


def _is_fine(text: str) -> bool:
    return len(text) <= MAX_CHARS and text.isprintable()
