"""The bodies that the OpenAI routes accept. Any other field is refused with a 400 that names it.

Fields that are pure labels have no effect by definition: user, metadata, verbosity, prompt_cache_key,
safety_identifier, and parallel_tool_calls as long as there are no tools. store has none, since nothing is stored, and
service_tier only that the reply says `default`. exo_mesh.api.neutral lists fields that are accepted at some values.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from exo_mesh.api.neutral import without_neutral_fields
from exo_mesh.errors import InputError
from exo_mesh.settings.config import did_you_mean

T = TypeVar("T")

_UNKNOWN = "Object contains unknown field"


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


class GroupBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tensor group of a stage as previews and /state show it: the leader first. `rdma` follows from the cables."""

    peers: list[str]
    backend: Literal["auto", "ring", "jaccl", "jaccl-ring"] = "auto"
    rdma: list[list[str | None]] = []


class StageBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A stage as `GET /instance/previews` shows it. What it says besides peer and layers is checked where it can still
    be: the engine, and with reserve_bytes the sum of weights, KV and overhead."""

    peer: str
    layers: tuple[int, int]
    engine: str | None = None
    reserve_bytes: int | None = None
    group: GroupBody | None = None
    name: str | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    overhead_bytes: int | None = None
    usable_bytes: int | None = None
    headroom_bytes: int | None = None


class InstanceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /instance."""

    model: str
    min_peers: int | None = None
    policy: Literal["memory", "latency", "throughput"] | None = None
    context_limit: int | None = None
    engine: str | None = None
    engine_preference: list[str] = []
    mixed_rings: Literal["auto", "never", "always"] | None = None
    tensor_group: int | None = None
    groups: list[list[str]] = []
    group_backend: Literal["auto", "ring", "jaccl", "jaccl-ring"] | None = None
    exclude_peers: list[str] = []
    replicas: int | None = None
    pins: dict[str, tuple[int, int]] | None = None
    stages: list[StageBody] | None = None


def decode_body(body: bytes, kind: type[T]) -> T:
    """The body as a struct. Raises InputError that names the field where it goes wrong."""
    try:
        return _decoded(body, kind)
    except msgspec.ValidationError as exc:
        raise _field_error(str(exc), kind) from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"the request body is not UTF-8 (byte {exc.start})") from exc
    except RecursionError as exc:
        raise InputError("the request body is nested too deep") from exc
    except msgspec.DecodeError as exc:
        raise InputError(f"the request body is not valid JSON: {exc}") from exc


def _decoded(body: bytes, kind: type[T]) -> T:
    """Neutral fields are looked for only if there is something unknown: that parses the body once more."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        if not issubclass(kind, GenerationBody) or _UNKNOWN not in str(exc):
            raise
        return msgspec.json.decode(without_neutral_fields(body, kind.__struct_fields__), type=kind)


def _field_error(message: str, kind: type) -> InputError:
    """msgspec says: Expected `float`, got `str` - at `$.temperature`; or: Object contains unknown field `foo` - at …"""
    text, _, place = message.partition(" - at ")
    path = re.search(r"`\$\.?([^`]*)`", place)
    param = path.group(1) if path else ""
    if unknown := re.fullmatch(rf"{_UNKNOWN} `(.*)`", text, re.DOTALL):
        near = "" if param else did_you_mean(unknown.group(1), [field.name for field in msgspec.structs.fields(kind)])
        param = f"{param}.{unknown.group(1)}" if param else unknown.group(1)
        return InputError(f"{param}: exo-mesh does not support this field{near}", param=param)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InputError(f"{param}: this field is required", param=param)
    return InputError(f"{param or 'the request body'}: {text[:1].lower()}{text[1:]}", param=param or None)
