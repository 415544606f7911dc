"""Reads calls as `name<arg_key>k</arg_key><arg_value>v</arg_value>`: GLM 4.5 to 4.7, Laguna, LongCat. Pure."""

from __future__ import annotations

import re
from functools import partial

from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.families.json_calls import read_json_calls
from exo_mesh.text.output.families.values import ANYTHING, ObjectWriter, ValueRules, read_text_value
from exo_mesh.text.output.json_text import read_object
from exo_mesh.text.output.reader import Malformed, More, Reader, markers
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

ARG_KEY_VALUES = ValueRules(ANYTHING, "space")
_NAME = re.compile(r"[\w./-]+")


def _read_calls(prefix: str, reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """Read one call. A call without arguments must have its end marker; other calls may miss it."""
    if (yield from reader.space()) in ("{", "["):
        yield from read_json_calls(reader, writer)
        return
    name = yield from _read_name(reader)
    following = yield from reader.space()
    if (yield from reader.accept(f"<{prefix}arg_key>")):
        writer.begin(name)
        yield from _read_arguments(reader, writer, schemas, name, prefix)
    elif following == "{":
        writer.begin(name)
        yield from read_object(reader, writer.arguments)
    else:
        yield from reader.expect(f"</{prefix}tool_call>")
        writer.begin(name)
        writer.arguments("{}")
    writer.end()


def _read_name(reader: Reader) -> More[str]:
    parts: list[str] = []
    while (yield from reader.peek()) and (found := reader.match(_NAME)) is not None:
        parts.append(reader.take(len(found.group())))
    if not parts:
        raise Malformed
    return "".join(parts)


def _read_arguments(reader: Reader, writer: EventWriter, schemas: Schemas, tool: str, prefix: str) -> More[None]:
    """Read the arguments; the opening tag of the first key was already read."""
    key_open, key_close = f"<{prefix}arg_key>", markers(f"</{prefix}arg_key>")
    value_open, value_close = f"<{prefix}arg_value>", markers(f"</{prefix}arg_value>")
    out = ObjectWriter(writer.arguments)
    while True:
        key = (yield from reader.text_until(key_close)).strip()
        yield from reader.space()
        yield from reader.accept("\\n")  # some models write a backslash and an n
        yield from reader.space()
        if not (yield from reader.accept(value_open)):
            break
        out.key(key)
        kinds = ARG_KEY_VALUES.kinds(schemas.parameter(tool, key))
        yield from read_text_value(reader, value_close, out, ARG_KEY_VALUES, kinds)
        yield from reader.space()
        if not (yield from reader.accept(key_open)):
            break
    out.close()


def _family(name: str, prefix: str) -> ToolFamily:
    inner = (f"</{prefix}tool_call>", f"<{prefix}arg_key>", f"</{prefix}arg_key>")
    values = (f"<{prefix}arg_value>", f"</{prefix}arg_value>")
    return ToolFamily(name, (f"<{prefix}tool_call>",), (*inner, *values), partial(_read_calls, prefix))


GLM = _family("glm47", "")
LONGCAT = _family("longcat", "longcat_")
