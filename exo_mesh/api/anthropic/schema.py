"""The bodies that the Anthropic routes accept. Any other field is refused with a 400 that names it.

Some fields have no effect: metadata, because nothing is recorded of it; service_tier, because there is one tier.
exo_mesh.api.anthropic.lenient lists fields that are accepted at some values. Content blocks and tools are decoded by
exo_mesh.api.anthropic.blocks, so that an unsupported kind is refused by its name.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from exo_mesh.api.anthropic.lenient import COUNTING, IN_MESSAGES, NEUTRAL
from exo_mesh.api.core.keeping import CacheRule
from exo_mesh.api.decoding import decode_body

Blocks = list[dict[str, Any]]


class MessageBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. A message with the role system is an instruction in the middle of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ToolChoiceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model may or must call tools. name: for the type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingWish(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Thinking options. adaptive: as the model's template does by itself. display "omitted": the blocks of thinking in
    the reply are empty."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of an answer, which is always enforced."""

    type: Literal["json_schema"]
    schema: dict[str, Any]
    name: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputForm | None = None


class ThinkingTurns(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How many turns of the assistant keep their thinking, counted from the last one."""

    type: Literal["thinking_turns", "all"]
    value: int | None = None


class ContextEdit(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An edit of the conversation before the model sees it. keep: the turns whose thinking stays; without it only the
    last turn of the assistant."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns | None = None


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Edits of the conversation before the model sees it."""

    edits: list[ContextEdit] | None = None


class CreatedThread(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="create"):
    """The node holds the conversation under the id of the reply."""


class ContinuedThread(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="continue"):
    """The conversation up to a reply comes before the messages of this request."""

    previous_message_id: str


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens. null always means the same as a missing field."""

    messages: list[MessageBody]
    model: str | None = None
    system: str | Blocks | None = None
    tools: Blocks | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingWish | None = None
    output_config: OutputConfig | None = None
    output_format: OutputForm | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None
    thread: CreatedThread | ContinuedThread | None = None


class MessagesBody(CountTokensBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. max_tokens 0: only read the prompt."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache: CacheRule | None = None
    prompt_cache_key: str | None = None


def decode_messages_body(body: bytes) -> MessagesBody:
    """Decode the body, dropping fields without effect. Raises InputError that names the wrong field."""
    return decode_body(body, MessagesBody, {MessagesBody: NEUTRAL, MessageBody: IN_MESSAGES})


def decode_count_body(body: bytes) -> CountTokensBody:
    """The same for a body whose tokens are counted. Fields that only say how to answer are dropped as well."""
    return decode_body(body, CountTokensBody, {CountTokensBody: {**NEUTRAL, **COUNTING}, MessageBody: IN_MESSAGES})
