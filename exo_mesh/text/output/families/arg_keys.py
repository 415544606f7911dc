"""`name<arg_key>k</arg_key><arg_value>v</arg_value>`: GLM 4.5 to 4.7, Laguna, and LongCat with its own prefix. Pure."""

from __future__ import annotations

import re
from functools import partial

from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.families.json_calls import read_json_calls
from exo_mesh.text.output.families.values import (
    ObjectWriter,
    ValueRules,
    is_string_type,
    json_or_literal,
    read_text_value,
)
from exo_mesh.text.output.json_text import decode
from exo_mesh.text.output.reader import Malformed, Markers, More, Reader
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

_RULES = ValueRules(is_string_type, json_or_literal, "space")
_PLAIN_CALL = re.compile(r"\s*([\w.:/-]+)\s*(\{.*\})?\s*", re.DOTALL)


def _read_calls(prefix: str, reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """One call, with its end marker."""
    if (yield from reader.space()) in ("{", "["):
        yield from read_json_calls(reader, writer)
        return
    key_open, end = f"<{prefix}arg_key>", f"</{prefix}tool_call>"
    parts: list[str] = []
    marker = yield from reader.until(Markers([key_open, end]), parts.append)
    name = "".join(parts)
    if marker != key_open:
        _write_plain_call(writer, name)
        return
    if not (name := name.strip()) or len(name.split()) > 1:
        raise Malformed
    writer.begin(name)
    yield from _read_arguments(reader, writer, schemas, name, prefix)
    writer.end()


def _write_plain_call(writer: EventWriter, text: str) -> None:
    """A name alone, or a name and an object."""
    found = _PLAIN_CALL.fullmatch(text)
    if found is None:
        raise Malformed
    arguments = found.group(2) or "{}"
    decode(arguments)
    writer.begin(found.group(1))
    writer.arguments(arguments)
    writer.end()


def _read_arguments(reader: Reader, writer: EventWriter, schemas: Schemas, tool: str, prefix: str) -> More[None]:
    """The opening of the first key was read."""
    key_open, key_close = f"<{prefix}arg_key>", Markers([f"</{prefix}arg_key>"])
    value_open, value_close = f"<{prefix}arg_value>", Markers([f"</{prefix}arg_value>"])
    out = ObjectWriter(writer.arguments)
    while True:
        key = (yield from reader.text_until(key_close)).strip()
        yield from reader.space()
        yield from reader.accept("\\n")  # some write the two characters
        yield from reader.space()
        if not (yield from reader.accept(value_open)):
            break
        schema = schemas.parameter(tool, key)
        out.key(key)
        yield from read_text_value(reader, value_close, out, _RULES, schema, is_string_type(schema))
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
