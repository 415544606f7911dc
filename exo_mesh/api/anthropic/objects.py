"""The objects of Anthropic's replies and of the events of its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

SIGNATURE = "exo-mesh"
"""The signature of thinking blocks. It is the same for all: exo-mesh takes thinking back as text and verifies nothing.
Clients only check that there is one."""


class TextObject(msgspec.Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingObject(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of the model."""

    thinking: str
    signature: str


class ToolUseObject(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call. input: {"invalid_arguments": text} if the model's arguments are not a JSON object."""

    id: str
    name: str
    input: dict[str, Any]


ContentObject = TextObject | ThinkingObject | ToolUseObject


class ThinkingTokens(msgspec.Struct):
    """Output tokens that were reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. input_tokens: of the prompt, without the tokens from the prefix cache (cache_read_input_tokens).
    Keeping tokens costs nothing, so none are counted as cache_creation_input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None
    service_tier: Literal["standard"] = "standard"


class DeltaUsage(msgspec.Struct, kw_only=True):
    """Token counts at the end of a stream."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageObject(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The reply of POST /v1/messages."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentObject]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event: the message without its content."""

    message: MessageObject


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block of content begins, empty."""

    index: int
    content_block: ContentObject


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, before its end."""

    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """The next part of the arguments of a call, as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """The next part of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class StopDelta(msgspec.Struct):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The end of the answer, with its token counts."""

    delta: StopDelta
    usage: DeltaUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class TokenCount(msgspec.Struct):
    """The reply of POST /v1/messages/count_tokens."""

    input_tokens: int


class ErrorObject(msgspec.Struct):
    """What went wrong. details: values for programs."""

    type: str
    message: str
    details: Mapping[str, Any] | UnsetType = UNSET


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """The reply to a failed call."""

    error: ErrorObject
    request_id: str
