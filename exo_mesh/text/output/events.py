"""The events of an answer, the same for every format in which models write. Pure."""

from __future__ import annotations

import msgspec

from exo_mesh.text.assembler import TokenSpan


class TextPart(msgspec.Struct, frozen=True):
    """The next piece of the answer. tokens: the tokens whose text ends in this piece; tokens of markers are in no part.

    The text is empty if the answer ends with tokens that have no text.
    """

    text: str
    tokens: tuple[TokenSpan, ...] = ()


class ReasoningPart(msgspec.Struct, frozen=True):
    """The next piece of the model's reasoning before its answer."""

    text: str
    tokens: tuple[TokenSpan, ...] = ()


class ToolCallBegin(msgspec.Struct, frozen=True):
    """The model begins a tool call. index: 0 for the first call of the answer. name: may be a tool that the request did
    not offer."""

    index: int
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """The next piece of the arguments of a call. All pieces of a call, joined, are a JSON object.

    If the answer ends inside the call, or the model wrote broken JSON, the pieces are the part that was written.
    """

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The arguments of a call are complete."""

    index: int


class OutputEnd(msgspec.Struct, frozen=True):
    """The last event. reason: "stop", "length" or "tool_calls". stop_string: the client's stop string that ended the
    answer; "" if none did."""

    reason: str
    stop_string: str = ""


OutputEvent = TextPart | ReasoningPart | ToolCallBegin | ToolCallArguments | ToolCallEnd | OutputEnd
