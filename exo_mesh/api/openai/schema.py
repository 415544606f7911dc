"""The bodies that the OpenAI routes accept. Any other field is refused with a 400 that names it.

Some fields have no effect: the labels user, metadata, verbosity and safety_identifier;
parallel_tool_calls without tools; a thinking budget and reasoning_effort for a model without this choice; store,
because nothing is stored. service_tier "flex" gives a request the lowest priority; other tiers only add "default" to
the reply. exo_mesh.api.openai.lenient lists fields that are accepted at some values.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from exo_mesh.api.core.keeping import CacheRule
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.openai.lenient import IN_MESSAGES, NEUTRAL


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. include_obfuscation would add padding against traffic analysis; exo-mesh has none, so it
    must be false."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. Clients send assistant replies back unchanged, with their empty fields.

    reasoning_content, reasoning and thinking are names of the same field. refusal: the assistant's text if it refused
    to answer.
    """

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


class FunctionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call. strict has no effect, because enforced calls always follow the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionBody
    cache_control: dict[str, Any] | None = None


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool by its name, which may also stand outside `function`, as in the Responses API."""

    type: Literal["function"]
    function: NamedFunction | None = None
    name: str | None = None


class AllowedFunctions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A choice among some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ChatToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that must be called, or the tools that the model may call; those may also stand outside `allowed_tools`,
    as in the Responses API."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    name: str | None = None
    allowed_tools: AllowedFunctions | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


class JsonSchemaBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of an answer. It is always enforced, so strict has no effect."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of an answer. schema: the schema itself, as llama-server, Together and Fireworks take it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None
    schema: dict[str, Any] | None = None


class PredictionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer that a client expects, as text or as parts of text."""

    type: Literal["content"] = "content"
    content: str | list[PredictionPart]


class PredictionPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of an expected answer."""

    type: Literal["text"] = "text"
    text: str


class SpeculationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the next tokens may be drafted: they never change the answer."""

    type: Literal["auto", "off"]


class GrammarBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A grammar that constrains the answer. value: a JSON schema, a regular expression, a Lark grammar, or a list of
    strings from which the answer is chosen."""

    type: Literal["json_schema", "regex", "lark", "choice"]
    value: str | list[str] | dict[str, Any]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A constraint in vLLM's form: exactly one of these fields. grammar: in Lark."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Thinking options in OpenRouter's form. The reply always contains the reasoning, so exclude must be false; the
    hints about a summary have no effect."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: int | None = None
    exclude: bool | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ThinkingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Thinking options in the form of DeepSeek, Kimi, Z.ai and Anthropic."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None


class UsageBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether a stream ends with the token counts, in OpenRouter's form; a reply without streaming always has them."""

    include: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The common fields of chat completions and plain completions. null always means the same as a missing field."""

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
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    service_tier: str | None = None
    keep_alive: float | str | None = None
    ttl: float | None = None
    cache: CacheRule | None = None
    cache_salt: str | None = None
    prediction: PredictionBody | None = None
    speculation: SpeculationBody | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    stop_token_ids: list[int] | None = None
    grammar: str | GrammarBody | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = None
    timings: bool | None = None
    timings_per_token: bool | None = None
    logprobs: bool | int | None = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningBody | None = None
    thinking: ThinkingBody | None = None
    think: bool | Effort | None = None
    usage: UsageBody | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    safety_identifier: str | None = None


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. add_special_tokens: whether the tokens that the model expects around a text, such as <s>,
    are put around the prompt; true by default."""

    prompt: str | list[Any]
    add_special_tokens: bool | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def decode_generation_body(body: bytes, kind: type[G]) -> G:
    """Decode the body into a struct, dropping fields without effect. Raises InputError that names the wrong field."""
    return decode_body(body, kind, {kind: NEUTRAL, Message: IN_MESSAGES})


G = TypeVar("G", bound=GenerationBody)
