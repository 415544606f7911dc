"""Feeds answers to the output parser, whole and in pieces, and puts the events together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exo_mesh.domain.request import FinishReason
from exo_mesh.text.assembler import Piece
from exo_mesh.text.output.events import (
    OutputEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from exo_mesh.text.output.formats import OutputFormat
from exo_mesh.text.output.parser import OutputParser
from exo_mesh.text.output.tools import Tool


@dataclass
class Parsed:
    """What a client would have put together from the events."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """[name, arguments] of each call."""
    finish: str = ""
    order: str = ""
    """The parts in their order: t, r, and c for a call."""


def tool(name: str, **properties: Any) -> Tool:
    """A tool whose parameters have these schemas."""
    return Tool(name, f"the tool {name}", {"type": "object", "properties": properties})


WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer"})


def events_of(
    output: OutputFormat,
    pieces: Iterable[str],
    *,
    tools: Sequence[Tool] = (WEATHER,),
    finish: FinishReason = FinishReason.STOP,
    **options: Any,
) -> list[OutputEvent]:
    """All events of an answer that comes in these pieces."""
    parser = OutputParser(output, tools=tools, **options)
    events = [event for piece in pieces for event in parser.push(Piece(piece))]
    return events + parser.push(Piece("", (), finish))


def joined(events: Iterable[OutputEvent]) -> Parsed:
    """The events put together; checks that they come in a legal order."""
    parsed, is_open = Parsed(), False
    for event in events:
        assert not parsed.finish, "nothing follows the end"
        letter = {TextPart: "t", ReasoningPart: "r", ToolCallBegin: "c"}.get(type(event), "")
        parsed.order += "" if parsed.order.endswith(letter) and letter != "c" else letter
        match event:
            case TextPart(text, tokens):
                assert (text or tokens) and not is_open, "tokens without text may come last"
                parsed.text += text
            case ReasoningPart(text):
                assert text and not is_open
                parsed.reasoning += text
            case ToolCallBegin(index, name):
                assert index == len(parsed.calls) and not is_open
                parsed.calls.append([name, ""])
                is_open = True
            case ToolCallArguments(index, text):
                assert is_open and text and index == len(parsed.calls) - 1
                parsed.calls[index][1] += text
            case ToolCallEnd(index):
                assert is_open and index == len(parsed.calls) - 1
                is_open = False
            case OutputEnd(reason):
                assert not is_open
                parsed.finish = reason
    assert parsed.finish
    "".join([parsed.text, parsed.reasoning, *(part for call in parsed.calls for part in call)]).encode()
    return parsed


def parse(output: OutputFormat, text: str, **options: Any) -> Parsed:
    """The answer in one piece; asserts that one character at a time gives the same."""
    whole = joined(events_of(output, [text], **options))
    assert joined(events_of(output, text, **options)) == whole
    return whole
