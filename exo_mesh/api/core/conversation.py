"""Translates neutral messages to the messages and variables of a chat template. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from exo_mesh.api.core.request import Conversation, FieldNames, ImageInput, Thinking, ToolCall, Turn
from exo_mesh.errors import InputError
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.template import RESERVED, ChatTemplate

TOGGLES = ("enable_thinking", "thinking")
"""Variables of templates that turn thinking on and off: the first of Qwen and GLM, the second of DeepSeek and
Granite."""

_RANKS = {name: rank for rank, name in enumerate(("type", "description", "enum", "properties", "required", "items"))}

_PARTS = re.compile(r"""['"]image['"]""")
"""In templates that read the parts of a message: the type of a part that is an image."""

NO_EFFORT = "none"
"""The reasoning effort that turns thinking off."""


def template_messages(
    turns: Sequence[Turn], template: ChatTemplate | None, image_marker: str = ""
) -> list[dict[str, Any]]:
    """One dict per message, its content as one string. Raises InputError for a field that the template never reads.

    image_marker: how the prompts of a model that takes images mark one. A template that knows parts then gets a message
    with images as parts; if it knows nothing else, all messages. Any other template gets the marker in the text.
    """
    source = template.source if template else ""
    messages = [_message(turn, source) for turn in turns]
    if not image_marker:
        return messages
    knows_parts = _PARTS.search(source) is not None
    needs_parts = knows_parts and "is string" not in source
    for turn, message in zip(turns, messages, strict=True):
        if knows_parts and (turn.parts or needs_parts):
            message["content"] = [_part(part) for part in turn.parts or (turn.text,)]
        elif turn.parts:
            message["content"] = "\n".join(part if isinstance(part, str) else image_marker for part in turn.parts)
    return messages


def _part(part: str | ImageInput) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def with_late_system_as_user(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns with each system message after the first other message as marked text of the user. Consecutive turns of
    the user become one, because templates that refuse the former also refuse these."""
    made: list[Turn] = []
    for turn in turns:
        if turn.role == "system" and any(earlier.role != "system" for earlier in made):
            turn = replace(turn, role="user", text=f"<system>\n{turn.text}\n</system>")
        if made and made[-1].role == turn.role == "user":
            made[-1] = joined_turns(made[-1], turn)
        else:
            made.append(turn)
    return tuple(made)


def joined_turns(first: Turn, second: Turn) -> Turn:
    """Two messages of one role as one, with the fields of the first."""
    parts = (*(first.parts or (first.text,)), *(second.parts or (second.text,)))
    text = "\n".join(text for text in (first.text, second.text) if text)
    return replace(first, text=text, parts=tuple(filter(None, parts)) if first.parts or second.parts else ())


def template_variables(conversation: Conversation, template: ChatTemplate | None, names: FieldNames) -> dict[str, Any]:
    """Variables for the template: the client's variables, the thinking options and the tools. Raises InputError."""
    variables = dict(conversation.variables)
    for name in sorted(RESERVED & variables.keys()):
        raise InputError(f"{names.variables}.{name} is reserved; a request may not set it", param=names.variables)
    known = template.variables if template else frozenset()
    variables |= _thinking_variables(conversation.thinking, known)
    if tools := offered_tools(conversation):
        if "tools" not in known:
            text = "the model's chat template does not support tools; use a model that lists the capability `tools`"
            raise InputError(text, param=names.tools)
        variables["tools"] = [tool.as_function() for tool in tools]
    return variables


def offered_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that the model may call, in canonical form; () if the client forbids calls."""
    return () if conversation.tool_choice.mode == "none" else tuple(map(canonical_tool, conversation.tools))


def canonical_tool(tool: Tool) -> Tool:
    """The same tool with the keys of its schema in a fixed order.

    Clients that keep objects in hash tables send the same tools in a different order each time. With a fixed order
    their prompts are equal, so a prefix cache finds them.
    """
    return replace(tool, parameters=_ordered(tool.parameters))


def _ordered(value: Any) -> Any:
    """Sort the keys: first the keywords in the order of the models' training data, then all others alphabetically."""
    if isinstance(value, dict):
        return {name: _ordered(value[name]) for name in sorted(value, key=lambda name: (_RANKS.get(name, 9), name))}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def _thinking_variables(thinking: Thinking, known: frozenset[str]) -> Mapping[str, Any]:
    """The thinking options as variables of the template. Options that the template does not read are dropped."""
    made: dict[str, Any] = {}
    enabled = thinking.enabled
    if thinking.effort is not None:
        made["reasoning_effort"] = thinking.effort
        enabled = (thinking.effort != NO_EFFORT) if enabled is None else enabled
    if enabled is not None:
        made |= dict.fromkeys(TOGGLES, enabled)
    if thinking.budget is not None:
        made["thinking_budget"] = thinking.budget
    return {name: value for name, value in made.items() if name in known}


def _message(turn: Turn, source: str) -> dict[str, Any]:
    # `developer` is a newer name for `system` that few templates know
    role = "system" if turn.role == "developer" and "developer" not in source else turn.role
    made: dict[str, Any] = {"role": role, "content": turn.text}
    if turn.name is not None and turn.role != "tool":
        _need(source, "name", turn.where)
    if turn.name is not None:
        made["name"] = turn.name
    if turn.tool_calls:
        _need(source, "tool_calls", turn.where)
        made["tool_calls"] = [_call(call) for call in turn.tool_calls]
    if turn.tool_call_id is not None:
        made["tool_call_id"] = turn.tool_call_id
    if turn.reasoning is not None:
        made["reasoning_content"] = turn.reasoning
    return made


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _need(source: str, field: str, where: str) -> None:
    """Raises InputError for a field that the template never reads, because it would be dropped silently."""
    if field not in source:
        raise InputError(f"{where}.{field}: the model's chat template does not use it", param=f"{where}.{field}")
