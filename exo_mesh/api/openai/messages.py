"""Chat messages as OpenAI's clients send them, to what a chat template reads."""

from __future__ import annotations

from typing import Any

import msgspec

from exo_mesh.api.openai.schema import Message
from exo_mesh.errors import InputError
from exo_mesh.text.template import ChatTemplate


def template_messages(messages: list[Message], template: ChatTemplate | None) -> list[dict[str, Any]]:
    """One dict per message, content as one string. Raises InputError that names the message and its field."""
    source = template.source if template else ""
    return [_message(message, f"messages[{index}]", source) for index, message in enumerate(messages)]


def _message(message: Message, where: str, source: str) -> dict[str, Any]:
    # `developer` is OpenAI's newer name for `system`; few templates know it.
    role = "system" if message.role == "developer" and "developer" not in source else message.role
    made: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        _need(source, "name", where)
        made["name"] = message.name
    if message.tool_calls:
        if message.role != "assistant":
            raise InputError(f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
        _need(source, "tool_calls", where)
        made["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        made["reasoning_content"] = message.reasoning_content
    return made


def _content(message: Message, where: str) -> str:
    """Parts are joined by newlines, as other servers do for templates that know strings only."""
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InputError(f"{where}.content is missing", param=f"{where}.content")
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for index, part in enumerate(message.content):
        place = f"{where}.content[{index}]"
        if part.get("type") != "text":
            raise InputError(f"{place}: parts of type {part.get('type')!r} are not supported; text is", param=place)
        if not isinstance(part.get("text"), str) or len(part) != 2:
            raise InputError(f"{place}: a text part has exactly `type` and `text`, which is a string", param=place)
        texts.append(part["text"])
    return "\n".join(texts)


def _need(source: str, field: str, where: str) -> None:
    """A field that the template never looks at would be dropped silently."""
    if field not in source:
        raise InputError(f"{where}.{field}: the model's chat template has no place for it", param=f"{where}.{field}")


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """OpenAI sends a call's arguments as a JSON string; templates read them as an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: a tool call has a `function` with a `name`", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
            raise InputError(f"{where}.function.arguments is not valid JSON: {exc}", param=where) from exc
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
