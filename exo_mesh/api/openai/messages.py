"""Chat messages as OpenAI's clients send them, to neutral turns."""

from __future__ import annotations

from typing import Any

import msgspec

from exo_mesh.api.core.request import ToolCall, Turn
from exo_mesh.api.openai.schema import Message
from exo_mesh.errors import InputError


def turns_of(messages: list[Message]) -> tuple[Turn, ...]:
    """Raises InputError that names the message and its field."""
    return tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(messages))


def _turn(message: Message, where: str) -> Turn:
    if message.tool_calls and message.role != "assistant":
        raise InputError(f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
    calls = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    text, has_cache_marks = _content(message, where)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    return Turn(message.role, text, where, message.name, tuple(calls), message.tool_call_id, reasoning, has_cache_marks)


def _content(message: Message, where: str) -> tuple[str, bool]:
    """The text, and whether the client marks in it up to where its prompt is cached. Parts are joined by newlines, as
    other servers do for templates that know strings only."""
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return "", False
        raise InputError(f"{where}.content is missing", param=f"{where}.content")
    if isinstance(message.content, str):
        return message.content, False
    texts: list[str] = []
    has_cache_marks = False
    for index, part in enumerate(message.content):
        place = f"{where}.content[{index}]"
        if part.get("type") != "text":
            raise InputError(f"{place}: parts of type {part.get('type')!r} are not supported; text is", param=place)
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text", "cache_control"}:
            raise InputError(f"{place}: a text part has exactly `type` and `text`, which is a string", param=place)
        texts.append(part["text"])
        has_cache_marks |= part.get("cache_control") is not None
    return "\n".join(texts), has_cache_marks


def _tool_call(call: dict[str, Any], where: str) -> ToolCall:
    """OpenAI sends a call's arguments as a JSON string; templates read them as an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: a tool call has a `function` with a `name`", param=where)
    arguments, call_id = function.get("arguments"), call.get("id")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
            raise InputError(f"{where}.function.arguments is not valid JSON: {exc}", param=where) from exc
    if not isinstance(call_id, str | None):
        raise InputError(f"{where}.id is not a string", param=f"{where}.id")
    return ToolCall(call_id or "", function["name"], {} if arguments is None else arguments)
