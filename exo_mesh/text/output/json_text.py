"""Reads JSON that arrives in pieces: whole values, and objects whose text is passed on as it arrives. Pure."""

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
    """Read a string with its quotes and send it to sink as JSON text. Control characters, which models often forget to
    escape, are escaped. Raises Malformed."""
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
    """Read the character after a backslash. Both go to sink together, so that no piece ends between them."""
    if not (yield from reader.peek()):
        raise Malformed
    sink("\\" + reader.take(1))


def read_value(reader: Reader, sink: Callable[[str], None]) -> More[None]:
    """Read one JSON value and send its text to sink; objects and arrays are not checked inside. Raises Malformed."""
    following = yield from reader.space()
    if following == '"':
        yield from read_string(reader, sink)
    elif following in ("{", "["):
        yield from _read_container(reader, sink)
    else:
        yield from _read_scalar(reader, sink)


def read_object(reader: Reader, sink: Callable[[str], None]) -> More[None]:
    """Read one JSON object and send its text to sink, as read_value does. Raises Malformed for any other value."""
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
    """Read a number, true, false or null, up to the first character that cannot belong to it. Raises Malformed."""
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
    """Read one JSON value and decode it. Raises Malformed."""
    parts: list[str] = []
    yield from read_value(reader, parts.append)
    return decode("".join(parts))


def decode(text: str) -> Any:
    """Decode JSON. Raises Malformed, also if the value is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Malformed from exc


def is_json(text: str) -> bool:
    """Whether the text is one whole JSON value; text that is nested too deeply to check counts as one."""
    try:
        json.loads(text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def encode(value: Any) -> str:
    """Encode a value as JSON that can be sent as UTF-8: a lone surrogate stays an escape. Raises ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def is_sendable(text: str) -> bool:
    """Whether the text can be sent as UTF-8, because it has no lone surrogate."""
    return _SURROGATE.search(text) is None
