"""Reads JSON that arrives in pieces: whole values, and objects whose text is passed on as it comes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from exo_mesh.text.output.reader import Malformed, More, Reader

_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_INSIDE = re.compile(r'[^"\\\x00-\x1f]*')
_SURROGATE = re.compile("[\ud800-\udfff]")
_SCALAR = re.compile(r"[-+.\w]*")


def read_string(reader: Reader, sink: Callable[[str], None]) -> More[None]:
    """A string with its quotes, as JSON text. Control characters, which models forget to escape, are escaped."""
    yield from reader.expect('"')
    sink('"')
    while following := (yield from reader.peek()):
        found = reader.match(_INSIDE)
        if found is not None and found.group():
            sink(reader.take(len(found.group())))
            continue
        reader.take(1)
        if following == "\\":
            yield from _read_escape(reader, sink)
        elif following == '"':
            sink('"')
            return
        else:
            sink(json.dumps(following)[1:-1])
    raise Malformed


def _read_escape(reader: Reader, sink: Callable[[str], None]) -> More[None]:
    """What follows a backslash; the pair is passed on together, so that no piece ends inside."""
    if not (yield from reader.peek()):
        raise Malformed
    sink("\\" + reader.take(1))


def read_value(reader: Reader, sink: Callable[[str], None]) -> More[None]:
    """The text of one JSON value; the inside of an object or array is passed on as it is. Raises Malformed."""
    following = yield from reader.space()
    if following == '"':
        yield from read_string(reader, sink)
    elif following in ("{", "["):
        yield from _read_container(reader, sink)
    else:
        yield from _read_scalar(reader, sink)


def read_object(reader: Reader, sink: Callable[[str], None]) -> More[None]:
    """As read_value, for what must be an object."""
    if (yield from reader.space()) != "{":
        raise Malformed
    yield from _read_container(reader, sink)


def _read_container(reader: Reader, sink: Callable[[str], None]) -> More[None]:
    depth = 0
    while following := (yield from reader.peek()):
        if following == '"':
            yield from read_string(reader, sink)
            continue
        found = reader.match(_OUTSIDE)
        if found is not None and found.group():
            sink(reader.take(len(found.group())))
            continue
        sink(reader.take(1))
        depth += 1 if following in "{[" else -1
        if depth == 0:
            return
    raise Malformed


def _read_scalar(reader: Reader, sink: Callable[[str], None]) -> More[None]:
    """A number, true, false or null: it ends where something else begins."""
    parts: list[str] = []
    while (yield from reader.peek()):
        found = reader.match(_SCALAR)
        if found is None or not found.group():
            break
        parts.append(reader.take(len(found.group())))
    text = "".join(parts)
    try:
        json.loads(text)
    except ValueError as exc:
        raise Malformed from exc
    sink(text)


def read_whole_value(reader: Reader) -> More[Any]:
    """One JSON value, decoded. Raises Malformed."""
    parts: list[str] = []
    yield from read_value(reader, parts.append)
    return decode("".join(parts))


def decode(text: str) -> Any:
    """Raises Malformed, also for what is nested too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Malformed from exc


def encode(value: Any) -> str:
    """A value as JSON that can be sent: a lone surrogate, which is no character, stays an escape. Raises ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def is_sendable(text: str) -> bool:
    """Whether the text has only characters."""
    return _SURROGATE.search(text) is None
