"""Decodes content blocks and tools, each by its type. Pure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from exo_mesh.api.core.image_inputs import image_of_base64
from exo_mesh.api.core.neutral_fields import refuse_unknown, refuse_unless, show_json
from exo_mesh.api.core.request import ImageInput
from exo_mesh.api.decoding import convert_part
from exo_mesh.errors import InputError

CacheMark = dict[str, Any]
"""The client's mark of a cache position; its time to live has no effect."""


class CitationsWish(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the answer shall cite a document; it must not."""

    enabled: bool | None = None


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text. citations, parsed_output: notes on an earlier reply."""

    type: Literal["text"]
    text: str
    cache_control: CacheMark | None = None
    citations: list[Any] | None = None
    parsed_output: Any = None


class ImageBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An image; only base64 is supported as its source."""

    type: Literal["image"]
    source: dict[str, Any]
    cache_control: CacheMark | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Thinking of an earlier reply. signature: not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: CacheMark | None = None


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Thinking of another server that only this server can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: CacheMark | None = None


class ToolUseBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier reply. caller: who made it."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = None
    cache_control: CacheMark | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheMark | None = None
    toolset_name: None = None


class TextSource(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The text of a document: `data`, or `content` as text or blocks of text."""

    type: Literal["text", "content"]
    data: str | None = None
    content: str | list[dict[str, Any]] | None = None
    media_type: Literal["text/plain"] | None = None


class DocumentBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A document; only its text is supported."""

    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: CitationsWish | None = None
    cache_control: CacheMark | None = None


class SearchResultBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A result of a search that the client has made."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[dict[str, Any]]
    citations: CitationsWish | None = None
    cache_control: CacheMark | None = None


class ToolDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. strict and eager_input_streaming have no effect: enforced calls always follow the
    schema, and arguments are always streamed as they come."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheMark | None = None


Block = (
    TextBlock
    | ImageBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock
    | SearchResultBlock
)

_KINDS: dict[str, type[Block]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
OF_SYSTEM = ("text",)
OF_USER = ("text", "image", "document", "search_result", "tool_result")
OF_ASSISTANT = ("text", "thinking", "redacted_thinking", "tool_use")
OF_RESULT = ("text", "document", "search_result")
"""The types of blocks that each kind of message may have."""


def decode_block(block: dict[str, Any], allowed: tuple[str, ...], where: str) -> Block:
    """Decode a content block. where: its place in the body, for errors. Raises InputError."""
    kind = block.get("type")
    if kind == "image" and kind not in allowed:
        message = f"{where}: images are supported only in messages of the user, beside the results of tools"
        raise InputError(message, param=where)
    if not isinstance(kind, str) or kind not in allowed:
        message = f"{where}: content blocks of type {show_json(kind)} are not supported here; allowed are "
        raise InputError(message + ", ".join(allowed), param=where)
    return convert_part(block, _KINDS[kind], where)


def decode_source(source: dict[str, Any], where: str) -> TextSource:
    """Decode the source of a document. Raises InputError unless it is text."""
    kind = source.get("type")
    if kind not in ("text", "content"):
        message = f"{where}.type is {show_json(kind)}; documents are supported only as text, so it must be "
        raise InputError(message + '"text" or "content"', param=f"{where}.type")
    return convert_part(source, TextSource, where)


def decode_image(block: ImageBlock, where: str) -> ImageInput:
    """The image of a block. Raises InputError for a source other than base64."""
    source, where = block.source, f"{where}.source"
    kind = source.get("type")
    if kind != "base64":
        message = (
            f'{where}.type is {show_json(kind)}; images are taken only as "base64", because a node keeps no files and '
            "does not fetch addresses that a request names"
        )
        raise InputError(message, param=f"{where}.type")
    refuse_unknown(source, {"type", "media_type", "data"}, where)
    return image_of_base64(source.get("data"), f"{where}.data")


def decode_tool(tool: dict[str, Any], where: str) -> ToolDefinition:
    """Decode a tool. Raises InputError for tools that Anthropic runs or defines, and for an empty name."""
    kind = tool.get("type")
    if kind not in (None, "", "custom"):
        message = (
            f"{where}.type is {show_json(kind)}: tools that Anthropic runs or defines are not supported, only tools "
            "with a name and an input_schema"
        )
        raise InputError(message, param=f"{where}.type")
    decoded = convert_part(tool, ToolDefinition, where)
    refuse_unless(f"{where}.defer_loading", decoded.defer_loading, (False,))
    if decoded.allowed_callers and "direct" not in decoded.allowed_callers:
        refuse_unless(f"{where}.allowed_callers", decoded.allowed_callers, (["direct"],))
    if not decoded.name:
        raise InputError(f"{where}.name is empty", param=f"{where}.name")
    return decoded
