"""`<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4, Ling and more. Pure."""

from __future__ import annotations

from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.families.json_calls import read_json_calls
from exo_mesh.text.output.reader import More, Reader
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

START, END = "<tool_call>", "</tool_call>"


def read_calls(reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
    """One call, or an array of calls. The end marker may be missing."""
    yield from read_json_calls(reader, writer)


HERMES = ToolFamily("hermes", (START,), (END,), read_calls)
