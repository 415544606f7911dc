"""Translates the chat messages of OpenAI's clients to neutral turns."""

from __future__ import annotations

from typing import Any

import msgspec

from exo_mesh.api.bodies.values import ValueBudget
from exo_mesh.api.core.call_arguments import object_of, with_calls_named
from exo_mesh.api.core.image_inputs import IMAGE_PARTS, image_of_part
from exo_mesh.api.core.neutral_fields import refuse_unknown, show_json
from exo_mesh.api.core.request import ImageInput, ToolCall, Turn
from exo_mesh.api.openai.schema import Message
from exo_mesh.errors import InputError


def turns_of(messages: list[Message]) -> tuple[Turn, ...]:
    """Translate the messages. Raises InputError that names the message and its field."""
    budget = ValueBudget()
    return with_calls_named(_turn(message, f"messages[{index}]", budget) for index, message in enumerate(messages))


def _turn(message: Message, where: str, budget: ValueBudget) -> Turn:
    if message.tool_calls and message.role != "assistant":
        message_text = f"{where}.tool_calls: only messages with the role assistant may have tool calls"
        raise InputError(message_text, param=f"{where}.tool_calls")
    calls = [_tool_call(call, f"{where}.tool_calls[{i}]", budget) for i, call in enumerate(message.tool_calls or ())]
    said = _said(message, where)
    given = (message.reasoning_content, message.reasoning, message.thinking, said.thought)
    reasoning = next((text for text in given if text), None)
    has_cache_marks = said.has_cache_marks or message.cache_control is not None
    return Turn(
        message.role,
        said.text,
        where,
        message.name or None,
        tuple(calls),
        message.tool_call_id or None,
        reasoning,
        has_cache_marks,
        said.parts,
    )


class _Said(msgspec.Struct, frozen=True):
    """The content of a message. thought: its reasoning. has_cache_marks: the client marks cache positions in it. parts:
    see Turn."""

    text: str
    thought: str | None = None
    has_cache_marks: bool = False
    parts: tuple[str | ImageInput, ...] = ()


def _said(message: Message, where: str) -> _Said:
    """Join the texts of a message's parts by newlines, as other servers do for templates that know only strings.

    The content may be missing for a tool without output, and for an assistant that was stopped before its first word or
    only reasoned or called tools.
    """
    if message.content is None:
        if message.role in ("assistant", "tool"):
            return _Said(message.refusal or "")
        raise InputError(f"{where}.content: this field is required", param=f"{where}.content")
    if isinstance(message.content, str):
        return _Said(message.content or message.refusal or "")
    texts: list[str] = []
    thoughts: list[str] = []
    parts: list[str | ImageInput] = []
    for index, part in enumerate(message.content):
        if part.get("type") in IMAGE_PARTS and message.role == "user":
            parts.append(image_of_part(part, f"{where}.content[{index}]"))
            continue
        is_thought, text = _part(part, message.role == "assistant", f"{where}.content[{index}]")
        (thoughts if is_thought else texts).append(text)
        if not is_thought:
            parts.append(text)
    has_cache_marks = any(part.get("cache_control") is not None for part in message.content)
    return _Said(
        "\n".join(texts),
        "\n".join(thoughts) if thoughts else None,
        has_cache_marks,
        tuple(parts) if len(parts) > len(texts) else (),
    )


_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text"}
_TEXT_OF_ASSISTANT = {**_TEXT_OF, "refusal": "refusal", "thinking": "thinking", "reasoning": "text"}
_THOUGHTS = ("thinking", "reasoning")
_PART_NOTES = {"type", "id", "annotations", "logprobs", "metadata", "cache_control", "signature"}


def _part(part: dict[str, Any], is_assistant: bool, where: str) -> tuple[bool, str]:
    """Whether a part is reasoning, and its text. Part types of OpenAI's Responses API are accepted, because some
    clients use both APIs."""
    kind = part.get("type")
    known = _TEXT_OF_ASSISTANT if is_assistant else _TEXT_OF
    if not isinstance(kind, str) or kind not in known:
        message = (
            f"{where}: content parts of type {show_json(kind)} are not supported here; {_takes(kind, is_assistant)}"
        )
        raise InputError(message, param=where)
    text = part.get(known[kind])
    if not isinstance(text, str):
        message = f"{where}: a part of type {show_json(kind)} needs a string in `{known[kind]}`"
        raise InputError(message, param=where)
    refuse_unknown(part, {known[kind], *_PART_NOTES}, where)
    return kind in _THOUGHTS, text


def _takes(kind: Any, is_assistant: bool) -> str:
    if kind == "input_audio":
        return "no model here takes audio"
    return '"text" is' if is_assistant or kind in IMAGE_PARTS else '"text" is, and "image_url" in messages of the user'


def _tool_call(call: dict[str, Any], where: str, budget: ValueBudget) -> ToolCall:
    """Translate a tool call. OpenAI's clients send the arguments as a JSON string; templates read an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: a tool call needs a `function` with a `name`", param=where)
    arguments, call_id = function.get("arguments"), call.get("id") or ""
    if not isinstance(call_id, str):
        raise InputError(f"{where}.id is not a string", param=f"{where}.id")
    return ToolCall(call_id, function["name"], object_of(arguments, budget, f"{where}.function.arguments"))
