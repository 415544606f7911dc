"""The bodies that the OpenAI routes accept. Any other field is refused with a 400 that names it.

Fields that are pure labels have no effect by definition: user, metadata, verbosity, prompt_cache_key,
safety_identifier, and parallel_tool_calls as long as there are no tools. store has none, since nothing is stored, and
service_tier only that the reply says `default`. exo_mesh.api.openai.lenient lists fields that are accepted at some
values.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from exo_mesh.api.decoding import decode_body
from exo_mesh.api.openai.lenient import without_neutral_fields


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """include_obfuscation asks for padding against traffic analysis; there is none here, so only false is honoured."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn. Clients send assistant replies back as they got them, with their empty fields."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and plain completions have in common. None is the same as absent everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    service_tier: str | None = None
    response_format: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. Of a list of prompts there may be one only."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def decode_generation_body(body: bytes, kind: type[G]) -> G:
    """The body as a struct, without fields that change nothing. Raises InputError that names the field at fault."""
    return decode_body(body, kind, lambda text: without_neutral_fields(text, kind.__struct_fields__))


G = TypeVar("G", bound=GenerationBody)
