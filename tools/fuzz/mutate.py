"""Makes malformed messages from good ones, determined by the random generator that is passed in."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

EXTREMES = (0, 1, 127, 128, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "a", "default", "../../etc/passwd", "\x1b[31mEVIL\n11:11:11 error: forged", "\u202egnp", "x" * 5000, "\0")
_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
    FieldDescriptor.TYPE_FIXED64: 2**64 - 1,
    FieldDescriptor.TYPE_INT32: 2**31 - 1,
    FieldDescriptor.TYPE_SINT32: 2**31 - 1,
    FieldDescriptor.TYPE_INT64: 2**63 - 1,
    FieldDescriptor.TYPE_SINT64: 2**63 - 1,
}


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Returns the data with one to four errors; sometimes noise instead, or the unchanged data."""
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(rng.choice((0, 1, 2, 9, 300, 20_000)))
    if kind < 0.1:
        return data
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        _CHANGES[rng.randrange(len(_CHANGES))](rng, changed)
    return bytes(changed)


def _flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randint(0, len(data)) :]


def _drop(rng: random.Random, data: bytearray) -> None:
    start = rng.randint(0, len(data))
    del data[start : start + rng.randint(1, 16)]


def _insert(rng: random.Random, data: bytearray) -> None:
    start = rng.randint(0, len(data))
    data[start:start] = rng.randbytes(rng.randint(1, 16))


def _repeat(rng: random.Random, data: bytearray) -> None:
    start = rng.randint(0, len(data))
    piece = bytes(data[start : start + rng.randint(1, 64)])
    data[start:start] = piece * rng.choice((1, 2, 50))


def _extreme(rng: random.Random, data: bytearray) -> None:
    start = rng.randint(0, len(data))
    value = rng.choice(EXTREMES)
    data[start : start + 8] = value.to_bytes(8, rng.choice(("little", "big")))


_CHANGES = (_flip, _cut, _drop, _insert, _repeat, _extreme)


def random_message(rng: random.Random, cls: Any, depth: int = 0) -> Message:
    """Returns a well-formed message of a type, with senseless values in about half of its fields."""
    message: Message = cls()
    for field in cls.DESCRIPTOR.fields:
        if rng.random() < 0.5 or depth > 3:
            continue
        for _ in range(_times(rng, message, field)):
            _put(rng, message, field, depth)
    return message


def _times(rng: random.Random, message: Message, field: Any) -> int:
    held = getattr(message, field.name)
    is_repeated = hasattr(held, "__len__") and not isinstance(held, str | bytes | Message)
    return rng.choice((1, 2, 5)) if is_repeated else 1


def _put(rng: random.Random, message: Message, field: Any, depth: int) -> None:
    held = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"]
        is_text = kind.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        held[rng.choice(TEXTS)] = _value(rng, kind) if is_text else rng.randrange(100)
    elif field.message_type is not None:
        part = held if isinstance(held, Message) else held.add()
        part.CopyFrom(random_message(rng, type(part), depth + 1))
    elif isinstance(held, str | bytes | bool | int | float):
        setattr(message, field.name, _value(rng, field))
    else:
        held.append(_value(rng, field))


def _value(rng: random.Random, field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 32, 1000)))
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice((0.0, -1.0, 1e30, float("inf"), float("nan")))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.randrange(6)
    return min(rng.choice(EXTREMES), _INTEGERS[field.type])
