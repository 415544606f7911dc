"""Decodes the items of a conversation and their parts, each by its type. Pure."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from exo_mesh.api.core.image_inputs import IMAGE_PARTS, image_of_part
from exo_mesh.api.core.neutral_fields import is_empty, refuse_unknown, show_json
from exo_mesh.api.core.request import ImageInput
from exo_mesh.api.decoding import convert_part
from exo_mesh.base.long_texts import decode_base64
from exo_mesh.errors import InputError


class MessageItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message. id, status, phase: notes on an earlier reply."""

    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    metadata: Any = None


class FunctionCallInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier reply. arguments: JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    caller: dict[str, Any] | None = None
    parsed_arguments: Any = None


class FunctionCallOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The result of a call: text, or parts of text."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: str | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    caller: dict[str, Any] | None = None


class CustomToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of a custom tool of an earlier reply. input: any text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    caller: dict[str, Any] | None = None


class ThoughtPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of reasoning."""

    text: str
    type: Literal["summary_text", "reasoning_text", "text"] = "reasoning_text"


class ReasoningItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning of an earlier reply. encrypted_content: see exo_mesh.api.responses.opaque."""

    type: Literal["reasoning"]
    summary: list[ThoughtPart] | None = None
    content: list[ThoughtPart] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


class ItemReference(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Stands for an item of a stored response."""

    id: str
    type: Literal["item_reference"] | None = None


InputItem = MessageItem | FunctionCallInput | FunctionCallOutput | CustomToolCall | ReasoningItem

_KINDS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallInput,
    "function_call_output": FunctionCallOutput,
    "custom_tool_call": CustomToolCall,
    "custom_tool_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}

_TEXT_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PART_NOTES = {"type", "annotations", "logprobs", "parsed", "cache_control", "id", "prompt_cache_breakpoint"}


def kind_of(item: dict[str, Any]) -> str:
    """The type of an item; clients leave it out for messages and references."""
    kind = item.get("type")
    if isinstance(kind, str):
        return kind
    return "message" if "role" in item else "item_reference" if "id" in item else "message"


def decode_item(item: dict[str, Any], where: str) -> InputItem:
    """Decode an item that is no reference. where: its place in the body, for errors. Raises InputError."""
    kind = kind_of(item)
    if kind not in _KINDS:
        message = f"{where}: items of type {show_json(kind)} are not supported; allowed are "
        raise InputError(message + ", ".join([*_KINDS, "item_reference"]), param=where)
    return convert_part(item, _KINDS[kind], where)


def text_of(content: str | Sequence[dict[str, Any]], where: str) -> str:
    """The text of the parts of a message or of a tool's output, joined by newlines. Raises InputError for parts without
    text."""
    if isinstance(content, str):
        return content
    texts = [_text_of_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return "\n".join(text for text in texts if text)


def parts_of(content: str | Sequence[dict[str, Any]], where: str) -> tuple[str | ImageInput, ...]:
    """The texts and images of a user's message, in order. Raises InputError."""
    if isinstance(content, str):
        return (content,)
    places = [f"{where}[{index}]" for index in range(len(content))]
    return tuple(
        image_of_part(part, place) if part.get("type") in IMAGE_PARTS else _text_of_part(part, place)
        for part, place in zip(content, places, strict=True)
    )


def _text_of_part(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind == "input_image":
        message = f"{where}: parts of type 'input_image' are supported only in messages of the user"
        raise InputError(message, param=where)
    if kind == "input_file":
        return _text_of_file(part, where)
    if not isinstance(kind, str) or kind not in _TEXT_FIELDS:
        message = f"{where}: parts of type {show_json(kind)} are not supported; allowed are "
        raise InputError(message + ", ".join([*_TEXT_FIELDS, "input_file"]), param=where)
    field = _TEXT_FIELDS[kind]
    text = part.get(field)
    if not isinstance(text, str):
        raise InputError(f"{where}: a part of type {show_json(kind)} needs a string in `{field}`", param=where)
    refuse_unknown(part, {field, *_PART_NOTES}, where)
    return text


def _text_of_file(part: dict[str, Any], where: str) -> str:
    """The text of a file, which must be in the request and be text. It begins with the file's name."""
    for field in ("file_id", "file_url"):
        if not is_empty(part.get(field)):
            message = f"{where}.{field}: files elsewhere are not supported; send their text in file_data"
            raise InputError(message, param=f"{where}.{field}")
    refuse_unknown(part, {"type", "filename", "file_data", "detail", "file_id", "file_url"}, where)
    name, data = part.get("filename"), part.get("file_data")
    if not isinstance(data, str):
        raise InputError(f"{where}.file_data: this field is required", param=f"{where}.file_data")
    head, comma, encoded = data.partition(",")
    try:
        if head.startswith("data:") and comma:
            text = decode_base64(encoded).decode() if head.endswith(";base64") else encoded
        else:
            text = decode_base64(data).decode()
    except (binascii.Error, ValueError) as exc:
        message = f"{where}.file_data: files are supported only as text: base64 of UTF-8, with or without `data:…,`"
        raise InputError(message, param=f"{where}.file_data") from exc
    return f"{name}\n{text}" if isinstance(name, str) and name else text
