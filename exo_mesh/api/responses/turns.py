"""Translates the items of a conversation to neutral turns. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.api.bodies.values import ValueBudget
from exo_mesh.api.core.call_arguments import object_of
from exo_mesh.api.core.conversation import joined_turns
from exo_mesh.api.core.request import ToolCall, Turn
from exo_mesh.api.responses.items import (
    CustomToolCall,
    FunctionCallInput,
    FunctionCallOutput,
    InputItem,
    MessageItem,
    ReasoningItem,
    decode_item,
    parts_of,
    text_of,
)
from exo_mesh.api.responses.opaque import MAX_CHARS, unpacked
from exo_mesh.errors import InputError

MAX_UNPACKED_CHARS = MAX_CHARS
"""Most characters of reasoning that one request unpacks: 4 kB of a packed text may be 4 MB."""

INPUT = "input"
"""The argument of a custom tool, which gets one text."""


def model_name(name: str, namespace: str | None) -> str:
    """The name of a tool for the model: models know no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def turns_of(items: Iterable[tuple[dict[str, Any], str]]) -> tuple[Turn, ...]:
    """Translate items, each with its place in the body. Raises InputError that names the place and the field.

    The reasoning, text and calls that follow each other are one turn of the assistant.
    """
    writer = _TurnWriter()
    for item, where in items:
        writer.add(decode_item(item, where), where)
    writer.flush("input")
    made: list[Turn] = []
    for role, group in groupby(writer.turns, lambda turn: turn.role):
        found = list(group)
        made += [joined_turns(found)] if role == "assistant" else found
    return tuple(made)


class _TurnWriter(msgspec.Struct):
    turns: list[Turn] = msgspec.field(default_factory=list)
    _thoughts: list[str] = msgspec.field(default_factory=list)
    _names: dict[str, str] = msgspec.field(default_factory=dict)
    """The tool of each call, by the id of the call."""
    _budget: ValueBudget = msgspec.field(default_factory=ValueBudget)
    _num_unpacked: int = 0

    def add(self, item: InputItem, where: str) -> None:
        match item:
            case MessageItem(role="assistant", content=content):
                self._say(Turn("assistant", text_of(content, f"{where}.content"), where))
            case MessageItem(role="user", content=content):
                self.flush(where)
                parts = parts_of(content, f"{where}.content")
                text = "\n".join(part for part in parts if isinstance(part, str) and part)
                has_images = not all(isinstance(part, str) for part in parts)
                self.turns.append(Turn("user", text, where, parts=parts if has_images else ()))
            case MessageItem(role=role, content=content):
                self.flush(where)
                self.turns.append(Turn(role, text_of(content, f"{where}.content"), where))
            case ReasoningItem():
                if thought := self._thought_of(item, where):
                    self._thoughts.append(thought)
            case FunctionCallInput(call_id=call_id, name=name, arguments=arguments):
                self._call(
                    ToolCall(call_id, model_name(name, item.namespace), object_of(arguments, self._budget, where)),
                    where,
                )
            case CustomToolCall(call_id=call_id, name=name, input=text):
                self._call(ToolCall(call_id, model_name(name, item.namespace), {INPUT: text}), where)
            case FunctionCallOutput(call_id=call_id, output=output):
                self.flush(where)
                text = text_of(output, f"{where}.output")
                name_of_tool = self._names.get(call_id)
                self.turns.append(Turn("tool", text, where, name=name_of_tool, tool_call_id=call_id))

    def flush(self, where: str) -> None:
        """Make a turn of reasoning that nothing of the assistant followed, because its answer was cut."""
        if self._thoughts:
            self._say(Turn("assistant", "", where))

    def _call(self, call: ToolCall, where: str) -> None:
        self._names[call.id] = call.name
        self._say(Turn("assistant", "", where, tool_calls=(call,)))

    def _say(self, turn: Turn) -> None:
        """Add a part of an assistant's turn, with the reasoning before it."""
        thought, self._thoughts = "\n".join(self._thoughts) or None, []
        self.turns.append(replace(turn, reasoning=thought))

    def _thought_of(self, item: ReasoningItem, where: str) -> str:
        """The text of reasoning: as such, else from its opaque form, else its summary."""
        if item.content:
            return "\n".join(part.text for part in item.content)
        if item.encrypted_content and (text := unpacked(item.encrypted_content)):
            self._num_unpacked += len(text)
            if self._num_unpacked > MAX_UNPACKED_CHARS:
                message = f"{where}: the packed reasoning up to here has more than {MAX_UNPACKED_CHARS} characters"
                raise InputError(message, param=where)
            return text
        return "\n".join(part.text for part in item.summary or ())
