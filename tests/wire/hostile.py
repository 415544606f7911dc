"""Messages in which every text field holds what must never reach a log or a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from exo_mesh.base.printable import MAX_CHARS
from exo_mesh.wire.proto import control_pb2, driver_pb2, paths_pb2, plan_pb2, ring_pb2, runner_pb2

HOSTILE = "\x1b[31mEVIL\n11:11:11 error: forged\x07\x9b\x7f\u202egnp\u2066\u2029" + "x" * MAX_CHARS
FILES = (control_pb2, driver_pb2, paths_pb2, plan_pb2, ring_pb2, runner_pb2)
MESSAGES: list[type[Message]] = [
    getattr(file, name) for file in FILES for name in sorted(file.DESCRIPTOR.message_types_by_name)
]


def filled(cls: Any) -> Iterator[Message]:
    """Messages of a type that together have each field set, in each nested message too; every text is HOSTILE."""
    message = cls()
    for field in cls.DESCRIPTOR.fields:
        if field.containing_oneof is None or field.containing_oneof.name.startswith("_"):
            _fill(message, field)
    yield message
    for oneof in cls.DESCRIPTOR.oneofs:
        for field in oneof.fields:
            one = cls()
            _fill(one, field)
            yield one


def _fill(message: Any, field: Any) -> None:
    value = getattr(message, field.name)
    is_repeated = hasattr(value, "__len__") and not isinstance(value, str | bytes | Message)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"].type
        value[HOSTILE] = {FieldDescriptor.TYPE_STRING: HOSTILE, FieldDescriptor.TYPE_BYTES: b"fine"}.get(kind, 1)
    elif field.message_type is not None:
        for inner in filled(type(value.add()) if is_repeated else type(value)):
            (value.add() if is_repeated else value).CopyFrom(inner)
    elif field.type == FieldDescriptor.TYPE_STRING:
        if is_repeated:
            value.extend([HOSTILE, "fine", HOSTILE])
        else:
            setattr(message, field.name, HOSTILE)


def texts_of(message: Message) -> Iterator[str]:
    """Every text in a message, keys of maps included."""
    for _, value in message.ListFields():
        yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Message):
        yield from texts_of(value)
    elif isinstance(value, Mapping):
        yield from (text for entry in value.items() for text in entry if isinstance(text, str))
    elif not isinstance(value, bytes | int | float):
        for item in value:
            yield from _texts(item)
