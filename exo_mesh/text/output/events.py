"""The events that an answer consists of, whatever the format in which a model writes them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.text.assembler import TokenSpan


@dataclass(frozen=True, slots=True)
class TextPart:
    """The next piece of the answer. `tokens`: those whose text ends in it; tokens of markers are in no part.

    The text is empty where the answer ends with tokens that have none.
    """

    text: str
    tokens: tuple[TokenSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """The next piece of what the model thinks before it answers."""

    text: str
    tokens: tuple[TokenSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The model calls a tool. index: 0 for the first call of the answer. The name may be one that nobody offered."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of the arguments of a call. All pieces of a call, joined, are a JSON object.

    If the answer ends inside the call, or the model wrote broken JSON, they are the part that was written.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of a call are complete."""

    index: int


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The last event. reason: "stop", "length" or "tool_calls"."""

    reason: str


OutputEvent = TextPart | ReasoningPart | ToolCallBegin | ToolCallArguments | ToolCallEnd | OutputEnd
