"""Neutral messages to what a chat template reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from exo_mesh.api.core.request import Conversation, FieldNames, Thinking, ToolCall, Turn
from exo_mesh.errors import InputError
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.template import RESERVED, ChatTemplate

_TOGGLES = ("enable_thinking", "thinking")
"""Variables with which templates turn thinking on and off: Qwen and GLM; DeepSeek and Granite."""

_RANKS = {name: rank for rank, name in enumerate(("type", "description", "enum", "properties", "required", "items"))}

NO_EFFORT = "none"
"""The effort that means: do not think."""


def template_messages(turns: Sequence[Turn], template: ChatTemplate | None) -> list[dict[str, Any]]:
    """One dict per message, content as one string. Raises InputError for what the template has no place for."""
    source = template.source if template else ""
    return [_message(turn, source) for turn in turns]


def template_variables(conversation: Conversation, template: ChatTemplate | None, names: FieldNames) -> dict[str, Any]:
    """Names for the template: what the client sets, how to think, and the tools. Raises InputError."""
    variables = dict(conversation.variables)
    for name in sorted(RESERVED & variables.keys()):
        raise InputError(f"{names.variables}.{name} is not for requests to set", param=names.variables)
    known = template.variables if template else frozenset()
    variables |= _thinking_variables(conversation.thinking, known)
    if tools := offered_tools(conversation):
        if "tools" not in known:
            text = "the model's chat template has no place for tools; use a model that lists the capability `tools`"
            raise InputError(text, param=names.tools)
        variables["tools"] = [tool.as_function() for tool in tools]
    return variables


def offered_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that the model may call, in their canonical form; none if the client forbids calls."""
    return () if conversation.tool_choice.mode == "none" else tuple(map(canonical_tool, conversation.tools))


def canonical_tool(tool: Tool) -> Tool:
    """The same tool with the keys of its schema in one order, whatever order the client has sent them in.

    Clients that keep objects in hash tables send the same tools in another order each time; the prompt of both is one,
    so that a cache of prompts finds it.
    """
    return replace(tool, parameters=_ordered(tool.parameters))


def _ordered(value: Any) -> Any:
    """Keywords as models have seen them in training come first, all other keys by the alphabet."""
    if isinstance(value, dict):
        return {name: _ordered(value[name]) for name in sorted(value, key=lambda name: (_RANKS.get(name, 9), name))}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def _thinking_variables(thinking: Thinking, known: frozenset[str]) -> Mapping[str, Any]:
    """Only names that the template reads: where a model has no such choice, no word changes its answer."""
    made: dict[str, Any] = {}
    enabled = thinking.enabled
    if thinking.effort is not None:
        made["reasoning_effort"] = thinking.effort
        enabled = (thinking.effort != NO_EFFORT) if enabled is None else enabled
    if enabled is not None:
        made |= dict.fromkeys(_TOGGLES, enabled)
    if thinking.budget is not None:
        made["thinking_budget"] = thinking.budget
    return {name: value for name, value in made.items() if name in known}


def _message(turn: Turn, source: str) -> dict[str, Any]:
    # `developer` is a newer name for `system`; few templates know it.
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
    """A field that the template never looks at would be dropped silently."""
    if field not in source:
        raise InputError(f"{where}.{field}: the model's chat template has no place for it", param=f"{where}.{field}")
