"""Reads tool calls as tags, with one tag per argument: Qwen 3 Coder, MiniMax, DeepSeek's DSML and others. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from exo_mesh.text.output.families.values import ANYTHING, TEXT, ObjectWriter, ValueRules, read_text_value
from exo_mesh.text.output.json_text import read_object
from exo_mesh.text.output.reader import Malformed, More, Reader, markers
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

_ATTRIBUTE = re.compile(r'([\w:-]+)\s*=\s*"([^"]*)"')
_IN_TAG = re.compile(r"[^<>]+")
_NO_NAME = re.compile(r"[\s<\"']")
_BARE_NAME = re.compile(r"\s*([^\s<>]+)")


def bare_name(header: str) -> str:
    """The name in `<function=NAME>`; "" if there is none."""
    found = _BARE_NAME.match(header)
    return found.group(1) if found and "<" not in header else ""


def quoted_name(header: str) -> str:
    """The name in `<invoke name="NAME">`; the quotes may be missing. "" if there is none."""
    name = header.strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        return name[1:-1]
    return "" if _NO_NAME.search(name) else name


def attributes(header: str) -> dict[str, str]:
    """The attributes of a tag."""
    found = _ATTRIBUTE.findall(header)
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}


class Argument(msgspec.Struct, frozen=True):
    """An argument as its tag describes it. is_text: whether the value is a string; None if the tag does not say."""

    name: str
    is_text: bool | None = None


class TagStyle(msgspec.Struct, frozen=True):
    """The tags of one format. An opening tag is `call_open`, a text that `name_of` reads, and `header_end`."""

    call_open: str
    call_close: str
    argument_open: str
    argument_close: str
    name_of: Callable[[str], str]
    argument_of: Callable[[str], Argument]
    rules: ValueRules
    header_end: str = ">"
    verbatim_open: str = ""
    """Marker before a value that may contain the closing tag, such as CDATA in XML."""
    verbatim_close: str = ""
    whole_open: str = ""
    """The tag around all arguments when they are one JSON object."""
    whole_close: str = ""


def read_tagged_calls(
    reader: Reader, writer: EventWriter, schemas: Schemas, style: TagStyle, *, is_open: bool = False
) -> More[None]:
    """Read one or more consecutive calls. is_open: `call_open` of the first was already read. Raises Malformed."""
    if not is_open:
        yield from reader.space()
        yield from reader.expect(style.call_open)
    while True:
        yield from _read_call(reader, writer, schemas, style)
        yield from reader.space()
        if not (yield from reader.accept(style.call_open)):
            return


def _read_call(reader: Reader, writer: EventWriter, schemas: Schemas, style: TagStyle) -> More[None]:
    """Read one call whose `call_open` was already read. If its closing tag is missing, the call ends at the next other
    text. Raises Malformed."""
    name = style.name_of((yield from _read_header(reader, style)))
    if not name:
        raise Malformed
    writer.begin(name)
    yield from reader.space()
    if style.whole_open and (yield from reader.accept(style.whole_open)):
        yield from _read_header(reader, style)
        yield from read_object(reader, writer.arguments)
        yield from reader.space()
        yield from reader.expect(style.whole_close)
    else:
        yield from _read_arguments(reader, writer, schemas, style, name)
    yield from reader.space()
    yield from reader.accept(style.call_close)
    writer.end()


def _read_header(reader: Reader, style: TagStyle) -> More[str]:
    """Read the rest of an opening tag, including its end. Raises Malformed if another tag begins inside."""
    if style.header_end != ">":
        return (yield from reader.text_until(markers(style.header_end)))
    parts: list[str] = []
    while (yield from reader.peek()) and (found := reader.match(_IN_TAG)) is not None:
        parts.append(reader.take(len(found.group())))
    yield from reader.expect(">")
    return "".join(parts)


def _read_arguments(reader: Reader, writer: EventWriter, schemas: Schemas, style: TagStyle, tool: str) -> More[None]:
    close = markers(style.argument_close)
    out = ObjectWriter(writer.arguments)
    while (yield from reader.accept(style.argument_open)):
        argument = style.argument_of((yield from _read_header(reader, style)))
        kinds = style.rules.kinds(schemas.parameter(tool, argument.name))
        if argument.is_text is not None:
            kinds = frozenset({"string"}) if argument.is_text else kinds if kinds - TEXT else ANYTHING
        out.key(argument.name)
        if style.verbatim_open and (yield from reader.space()) and (yield from reader.accept(style.verbatim_open)):
            rules = replace(style.rules, trim="none")
            yield from read_text_value(reader, markers(style.verbatim_close), out, rules, kinds)
            yield from reader.text_until(close)
        else:
            yield from read_text_value(reader, close, out, style.rules, kinds)
        yield from reader.space()
    out.close()
