"""The bodies that the routes of responses accept. Any other field is refused with a 400 that names it.

Some fields have no effect: the labels user, metadata and safety_identifier; text.verbosity;
reasoning.effort for a model without this choice. exo_mesh.api.responses.lenient lists fields that are accepted at some
values. Items, their parts and tools are decoded by exo_mesh.api.responses.items and tools, so that an unsupported kind
is refused by its name.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from exo_mesh.api.core.keeping import CacheRule
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.openai.schema import Effort
from exo_mesh.api.responses.lenient import COUNTING, NEUTRAL

Item = dict[str, Any]


class ReasoningWish(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Thinking options. summary: send the reasoning as summary parts; its text is the same. generate_summary: the
    former name of summary. max_tokens: most tokens of reasoning. context, mode: not supported by any model here."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    max_tokens: int | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer. A schema is always enforced, so strict has no effect."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextWish(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the answer's text."""

    format: TextForm | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamWish(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. include_obfuscation would add padding against traffic analysis; exo-mesh has none, so it
    must be false."""

    include_obfuscation: bool | None = None


class InputTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses/input_tokens. null always means the same as a missing field."""

    input: str | list[Item] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningWish | None = None
    text: TextWish | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesBody(InputTokensBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    stream: bool | None = None
    stream_options: StreamWish | None = None
    store: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    keep_alive: float | str | None = None
    ttl: float | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache: CacheRule | None = None


def decode_responses_body(body: bytes) -> ResponsesBody:
    """Decode the body, dropping fields without effect. Raises InputError that names the wrong field."""
    return decode_body(body, ResponsesBody, {ResponsesBody: NEUTRAL})


def decode_input_tokens_body(body: bytes) -> InputTokensBody:
    """The same for a body whose tokens are counted. Fields that only say how to answer are dropped as well."""
    return decode_body(body, InputTokensBody, {InputTokensBody: {**NEUTRAL, **COUNTING}})
