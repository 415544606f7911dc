"""Formats with calls as JSON between markers: Hermes and Qwen, Llama 3, Granite, Phi, Nemotron, Command. Pure."""

from __future__ import annotations

from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.families.json_calls import read_json_call, read_json_calls
from exo_mesh.text.output.reader import More, Reader
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter


def _read_calls(reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """Read one call, or an array of calls. The end marker may be missing."""
    yield from read_json_calls(reader, writer)


def _read_bare_calls(reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """Read calls without a start marker, or after <|python_tag|>, separated by semicolons. A plain answer may be JSON,
    too, so without the marker a call must name a tool that was offered."""
    known = None if start else schemas.names
    if (yield from reader.space()) == "[":
        yield from read_json_calls(reader, writer, known)
        return
    yield from read_json_call(reader, writer, known)
    while (yield from reader.space()) in (";", ","):
        reader.take(1)
        yield from read_json_call(reader, writer, known)


def _family(name: str, start: str, *inner: str) -> ToolFamily:
    return ToolFamily(name, (start,), inner, _read_calls)


HERMES = _family("hermes", "<tool_call>", "</tool_call>")
NEMOTRON = _family("nemotron", "<TOOLCALL>", "</TOOLCALL>")
PHI = _family("phi4", "<|tool_call|>", "<|/tool_call|>")
GRANITE = _family("granite", "<|tool_call|>")
COMMAND = _family("command", "<|START_ACTION|>", "<|END_ACTION|>")
LLAMA3 = ToolFamily("llama3_json", ("<|python_tag|>",), (), _read_bare_calls, bare_starts="{[")
