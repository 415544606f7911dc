"""Reads calls as `call:name{key:value}` with special markers around strings: Gemma 4 and FunctionGemma. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.json_text import read_string
from exo_mesh.text.output.reader import Malformed, More, Reader, markers
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

Sink = Callable[[str], None]

MAX_DEPTH = 64
_NAME = re.compile(r"[\w.-]+")
_SCALAR = re.compile(r"[^,}\]]*")


def _read_calls(quote: str, reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """Read one or more consecutive calls."""
    yield from reader.space()
    yield from reader.expect("call:")
    while True:
        name = (yield from reader.text_until(markers("{"))).strip()
        if not _NAME.fullmatch(name):
            raise Malformed
        writer.begin(name)
        yield from _read_members(reader, writer.arguments, quote, 0)
        writer.end()
        yield from reader.space()
        if not (yield from reader.accept("call:")):
            return


def _read_members(reader: Reader, sink: Sink, quote: str, depth: int) -> More[None]:
    """Read the inside of an object; its opening brace was already read."""
    separator = "{"
    while (following := (yield from reader.space())) != "}":
        if not following or depth > MAX_DEPTH:
            raise Malformed
        sink(separator + json.dumps((yield from _read_key(reader, quote)), ensure_ascii=False) + ": ")
        yield from _read_value(reader, sink, quote, depth)
        yield from _read_comma(reader)
        separator = ", "
    reader.take(1)
    sink("{}" if separator == "{" else "}")


def _read_items(reader: Reader, sink: Sink, quote: str, depth: int) -> More[None]:
    """Read the inside of an array; its opening bracket was already read."""
    separator = "["
    while (following := (yield from reader.space())) != "]":
        if not following or depth > MAX_DEPTH:
            raise Malformed
        sink(separator)
        yield from _read_value(reader, sink, quote, depth)
        yield from _read_comma(reader)
        separator = ", "
    reader.take(1)
    sink("[]" if separator == "[" else "]")


def _read_comma(reader: Reader) -> More[None]:
    """Read the comma after a member, if there is one. Raises Malformed unless a comma or a closing bracket follows."""
    following = yield from reader.space()
    if following == ",":
        reader.take(1)
    elif following not in ("}", "]"):
        raise Malformed


def _read_key(reader: Reader, quote: str) -> More[str]:
    if (yield from reader.accept(quote)):
        key = yield from reader.text_until(markers(quote))
        yield from reader.space()
        yield from reader.expect(":")
        return key
    return (yield from reader.text_until(markers(":"))).strip().strip('"')


def _read_value(reader: Reader, sink: Sink, quote: str, depth: int) -> More[None]:
    following = yield from reader.space()
    if (yield from reader.accept(quote)):
        yield from _read_quoted(reader, sink, quote)
    elif following == "{":
        reader.take(1)
        yield from _read_members(reader, sink, quote, depth + 1)
    elif following == "[":
        reader.take(1)
        yield from _read_items(reader, sink, quote, depth + 1)
    elif following == '"':
        yield from read_string(reader, sink)
    else:
        yield from _read_scalar(reader, sink)


def _read_quoted(reader: Reader, sink: Sink, quote: str) -> More[None]:
    sink('"')
    if not (yield from reader.until(markers(quote), lambda text: sink(json.dumps(text, ensure_ascii=False)[1:-1]))):
        raise Malformed
    sink('"')


def _read_scalar(reader: Reader, sink: Sink) -> More[None]:
    """Read a number or a word of JSON; any other text is a string without quotes."""
    parts: list[str] = []
    while (yield from reader.peek()):
        found = reader.match(_SCALAR)
        if found is None or not found.group():
            break
        parts.append(reader.take(len(found.group())))
    text = "".join(parts).strip()
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        value = text
    sink(text if not isinstance(value, str) else json.dumps(text, ensure_ascii=False))


def _family(name: str, start: str, end: str, quote: str, *inner: str) -> ToolFamily:
    return ToolFamily(name, (start,), (end, quote, *inner), partial(_read_calls, quote), ends_reasoning=True)


GEMMA4 = _family("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
FUNCTION_GEMMA = _family("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
