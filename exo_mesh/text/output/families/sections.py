"""Reads calls as a name and a JSON object between special markers: Kimi K2, DeepSeek V3 and V3.1, Mistral. Pure."""

from __future__ import annotations

import re

from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.families.json_calls import read_json_calls
from exo_mesh.text.output.json_text import read_object
from exo_mesh.text.output.reader import Malformed, More, Reader, markers
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?(.+?):\d+\s*", re.DOTALL)

_DEEP_BEGIN, _DEEP_SEPARATOR, _DEEP_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = re.compile(r"\s*(\S+)\s*```json\s*")

_MISTRAL_NAME = re.compile(r"[\w.-]+")


def _read_kimi(reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    yield from reader.space()
    yield from reader.expect(_KIMI_BEGIN)
    while True:
        header = yield from reader.text_until(markers(_KIMI_ARGUMENTS, _KIMI_END))
        found = _KIMI_NAME.fullmatch(header)
        if found is None or (yield from reader.space()) != "{":
            raise Malformed
        yield from _read_object_call(reader, writer, found.group(1))
        yield from reader.space()
        yield from reader.accept(_KIMI_END)
        yield from reader.space()
        if not (yield from reader.accept(_KIMI_BEGIN)):
            return


def _read_object_call(reader: Reader, writer: EventWriter, name: str) -> More[None]:
    writer.begin(name)
    yield from read_object(reader, writer.arguments)
    writer.end()


def _read_deepseek(reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """Read DeepSeek's calls. V3 and R1 write `function<sep>name`, a line break and a fenced block; V3.1 writes
    `name<sep>` and the object."""
    yield from reader.space()
    yield from reader.expect(_DEEP_BEGIN)
    while True:
        header = (yield from reader.text_until(markers(_DEEP_SEPARATOR))).strip()
        if (yield from reader.space()) != "{":
            before = yield from _text_before_brace(reader)
            found = _FENCE.fullmatch(before)
            header = found.group(1) if found else ""
        if not header:
            raise Malformed
        yield from _read_object_call(reader, writer, header)
        yield from reader.space()
        yield from reader.accept("```")
        yield from reader.space()
        yield from reader.accept(_DEEP_END)
        yield from reader.space()
        if not (yield from reader.accept(_DEEP_BEGIN)):
            return


_NOT_BRACE = re.compile(r"[^{<]*")


def _text_before_brace(reader: Reader) -> More[str]:
    """Read the text before `{`, but not `{` itself. Raises Malformed if `<` or the end comes first."""
    parts: list[str] = []
    while (following := (yield from reader.peek())) != "{":
        found = reader.match(_NOT_BRACE)
        if following in ("", "<") or found is None:
            raise Malformed
        parts.append(reader.take(len(found.group())))
    return "".join(parts)


def _read_mistral(reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """Read an array of calls, or `name[ARGS]{…}`; some models write an id between name and arguments."""
    if (yield from reader.space()) in ("[", "{"):
        yield from read_json_calls(reader, writer)
        return
    while True:
        name = (yield from _text_before_mark(reader)).strip()
        if not _MISTRAL_NAME.fullmatch(name):
            raise Malformed
        if (yield from reader.accept("[CALL_ID]")):
            yield from _text_before_mark(reader)
        yield from reader.accept("[ARGS]")
        if (yield from reader.space()) != "{":
            raise Malformed
        yield from _read_object_call(reader, writer, name)
        reader.record()
        if not (yield from reader.space()) or not (yield from _comes_name(reader)):
            return


_NOT_MARK = re.compile(r"[^\[{<]*")


def _text_before_mark(reader: Reader) -> More[str]:
    """Read the text before `[` or `{`, but not that character. Raises Malformed if `<` or the end comes first."""
    parts: list[str] = []
    while (following := (yield from reader.peek())) not in ("[", "{"):
        found = reader.match(_NOT_MARK)
        if following in ("", "<") or found is None:
            raise Malformed
        parts.append(reader.take(len(found.group())))
    return "".join(parts)


def _comes_name(reader: Reader) -> More[bool]:
    return bool(_MISTRAL_NAME.match((yield from reader.peek())))


KIMI_K2 = ToolFamily(
    "kimi_k2",
    ("<|tool_calls_section_begin|>",),
    ("<|tool_calls_section_end|>", _KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END),
    _read_kimi,
    ends_reasoning=True,
)
DEEPSEEK_V3 = ToolFamily(
    "deepseek_v3",
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁end｜>", _DEEP_BEGIN, _DEEP_SEPARATOR, _DEEP_END),
    _read_deepseek,
    ends_reasoning=True,
)
MISTRAL = ToolFamily("mistral", ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]"), _read_mistral, ends_reasoning=True)
