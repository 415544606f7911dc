"""Translates Ollama's bodies to neutral requests. Pure."""

from __future__ import annotations

from typing import Any

from exo_mesh.api.core.checks import check_num_tools, check_range, check_stops, repetition_of, stop_strings
from exo_mesh.api.core.conversation import without_empty_ending
from exo_mesh.api.core.grammar import grammar_of
from exo_mesh.api.core.keeping import keep_alive_s
from exo_mesh.api.core.neutral_fields import show_json
from exo_mesh.api.core.request import (
    Conversation,
    FieldNames,
    NeutralRequest,
    Prompts,
    SamplingWish,
    Thinking,
    Turn,
)
from exo_mesh.api.ollama.messages import parts_of, turns_of
from exo_mesh.api.ollama.schema import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaNamedBody,
    OllamaOptions,
    OllamaTool,
)
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.output.tools import Tool

NO_LIMITS = (-2, -1, 0)
"""Values of num_predict for an answer without a limit: to fill the context, for ever, and (in Ollama's server) 0."""
RANDOM_SEED = -1
MAX_TOP_LOGPROBS = 20

_RANGES: dict[str, tuple[float, float]] = {
    "num_predict": (-2, 2**31 - 1),
    "num_ctx": (0, 2**31 - 1),
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "seed": (-(2**63), 2**63 - 1),
    "repeat_penalty": (0.01, 10),
    "repeat_last_n": (-1, 2**31 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


def neutral_chat(body: OllamaChatBody) -> NeutralRequest:
    """Translate a chat body. Raises InputError that names the wrong field.

    A conversation that ends with the assistant's words is continued there, as Ollama does.
    """
    turns = without_empty_ending(turns_of(body.messages or ()))
    check_num_tools(body.tools or ())
    last = turns[-1] if turns else None
    continues = last is not None and last.role == "assistant" and not last.tool_calls and bool(last.text)
    conversation = Conversation(
        turns,
        tuple(_tool(tool, index) for index, tool in enumerate(body.tools or ())),
        thinking=thinking_of(body),
        continues_last=continues,
    )
    return _neutral(body, conversation, "messages")


def neutral_generate(body: OllamaGenerateBody) -> NeutralRequest:
    """Translate a generate body: a conversation of one message or, if raw, the bare prompt. Raises InputError."""
    if body.raw:
        if body.system:
            raise InputError("system is not used with raw: put it into the prompt", param="system")
        if body.think:
            text = "think is not used with raw: the chat template turns thinking on; leave raw out"
            raise InputError(text, param="think")
        if body.images:
            text = "images are not used with raw: the chat template says where an image goes; leave raw out"
            raise InputError(text, param="images")
        return _neutral(body, Prompts((body.prompt or "",)), "prompt")
    turns = [Turn("system", body.system, "system")] if body.system else []
    parts = parts_of(body.prompt, body.images, "images")
    turns.append(Turn("user", body.prompt or "", "prompt", parts=parts))
    return _neutral(body, Conversation(tuple(turns), thinking=thinking_of(body)), "prompt")


def named(body: OllamaNamedBody) -> str | None:
    """The model that a body names; None if it names none. Raises InputError if model and name differ."""
    if body.model and body.name and body.model != body.name:
        raise InputError("model and name are two names of the same field: send only one", param="name")
    return body.model or body.name or None


def asks_for_no_limit(body: OllamaGenerationBody) -> bool:
    """Whether the client asks for an answer without a token limit."""
    return body.options is not None and body.options.num_predict in NO_LIMITS


def thinking_of(body: OllamaGenerationBody) -> Thinking:
    """The thinking options; without `think`, the model's default."""
    if isinstance(body.think, str):
        return Thinking(enabled=True, effort=body.think)
    return Thinking(body.think)


def keeps_for_s(body: OllamaGenerationBody) -> float | None:
    """How long the model stays loaded after the request; negative: for ever; None: the mesh's setting. Raises
    InputError."""
    return keep_alive_s(body.keep_alive, "keep_alive")


def _neutral(body: OllamaGenerationBody, subject: Conversation | Prompts, field: str) -> NeutralRequest:
    options = body.options or OllamaOptions()
    for name, (low, high) in _RANGES.items():
        check_range(f"options.{name}", getattr(options, name), low, high)
    check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        raise InputError('top_logprobs is only allowed together with "logprobs": true', param="top_logprobs")
    stops = stop_strings(options.stop)
    check_stops(stops, "options.stop")
    limit = options.num_predict
    return NeutralRequest(
        named(body),
        subject,
        _sampling(options, (body.top_logprobs or 0) if body.logprobs else None),
        _grammar(body.format),
        None if limit in NO_LIMITS else limit,
        stops=stops,
        keep_alive_s=keeps_for_s(body),
        names=FieldNames(messages=field, prompt=field, max_tokens="options.num_predict", grammar="format"),
    )


def _sampling(options: OllamaOptions, num_top: int | None) -> SamplingWish:
    penalty, window = repetition_of(options.repeat_penalty, options.repeat_last_n)
    return SamplingWish(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=penalty,
        repetition_window=window,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=None if options.seed == RANDOM_SEED else options.seed,
        logprobs=num_top,
    )


def _grammar(wanted: str | dict[str, Any] | None) -> GrammarSpec | None:
    """The grammar of the answer. Raises InputError for a format that is neither "json" nor a schema."""
    if wanted is None or wanted == "":
        return None
    if isinstance(wanted, dict):
        return grammar_of("json_schema", wanted, "format")
    if wanted != "json":
        raise InputError(f'format is {show_json(wanted)}; it must be "json" or a JSON schema', param="format")
    return GrammarSpec("json_schema", '{"type": "object"}')


def _tool(tool: OllamaTool, index: int) -> Tool:
    where = f"tools[{index}].function.name"
    if not tool.function.name:
        raise InputError(f"{where} is empty", param=where)
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    return Tool(tool.function.name, tool.function.description or "", parameters, f"tools[{index}].function.parameters")
