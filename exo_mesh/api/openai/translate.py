"""Translates OpenAI's bodies to neutral requests."""

from __future__ import annotations

from typing import Any

import msgspec

from exo_mesh.api.core.checks import first_given, repetition_of, stop_strings, token_ids_of
from exo_mesh.api.core.grammar import grammar_of
from exo_mesh.api.core.keeping import cache_wish, keep_alive_s
from exo_mesh.api.core.neutral_fields import show_json
from exo_mesh.api.core.request import (
    Conversation,
    FieldNames,
    NeutralRequest,
    Prompt,
    Prompts,
    SamplingWish,
    Thinking,
    ToolChoice,
)
from exo_mesh.api.openai.checks import MAX_CHOICES, NO_LIMIT
from exo_mesh.api.openai.messages import turns_of
from exo_mesh.api.openai.replies import Delivery
from exo_mesh.api.openai.schema import (
    ChatBody,
    ChatToolChoice,
    CompletionBody,
    GenerationBody,
    GrammarBody,
    NamedTool,
    PredictionBody,
    ReasoningBody,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    ToolBody,
)
from exo_mesh.base.printable import counted
from exo_mesh.domain.request import FLEX_PRIORITY, GrammarKind, GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.output.tools import Tool

FLEX = "flex"
"""The service tier of requests that run while no other request waits."""

COMPLETION_MAX_TOKENS = 16  # OpenAI's documented default for /v1/completions


def neutral_chat(body: ChatBody) -> NeutralRequest:
    """Translate a chat body. Raises InputError that names the wrong field."""
    variables = dict(body.chat_template_kwargs or {})
    tools, choice = _choose_tools(body, tuple(_tool(tool, index) for index, tool in enumerate(body.tools or ())))
    conversation = Conversation(
        turns_of(body.messages),
        tools,
        choice,
        body.parallel_tool_calls is not False,
        thinking_of(body),
        variables,
        bool(body.continue_final_message),
        body.add_generation_prompt,
    )
    grammar, field = _grammar(body, body.response_format)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return NeutralRequest(
        body.model,
        conversation,
        _sampling(body, num_top),
        grammar,
        _limit_of(first_given(body.max_completion_tokens, body.max_tokens)),
        num_choices=body.n or 1,
        num_drawn=body.n or 1,
        prompt_logprobs=body.prompt_logprobs,
        names=_names(field),
        **_common(body),
    )


def thinking_of(body: ChatBody) -> Thinking:
    """The thinking options, from the fields of all supported servers. If several are given, the first one here wins."""
    reasoning, thinking, think = body.reasoning or ReasoningBody(), body.thinking, body.think
    asked = None if thinking is None or thinking.type in ("adaptive", "auto") else thinking.type == "enabled"
    as_ollama = think if isinstance(think, bool) else None
    return Thinking(
        first_given(body.enable_thinking, reasoning.enabled, asked, as_ollama),
        first_given(body.reasoning_effort, reasoning.effort, think if isinstance(think, str) else None),
        first_given(
            body.thinking_budget,
            body.thinking_token_budget,
            reasoning.max_tokens,
            thinking.budget_tokens if thinking else None,
        ),
    )


def neutral_completion(body: CompletionBody) -> NeutralRequest:
    """Translate a completion body. Raises InputError that names the wrong field."""
    prompts = prompts_of(body.prompt)
    num_choices = body.n or 1
    num_drawn = max(num_choices, body.best_of or 1)
    if len(prompts) * num_drawn > MAX_CHOICES:
        message = (
            f"{counted(len(prompts), 'prompt')} with {counted(num_drawn, 'answer')} each are "
            f"{len(prompts) * num_drawn} answers; "
            f"at most {MAX_CHOICES} are allowed"
        )
        raise InputError(message, param="prompt" if num_drawn == 1 else "n")
    grammar, field = _grammar(body, None)
    return NeutralRequest(
        body.model,
        Prompts(prompts, bool(body.echo), body.add_special_tokens is not False),
        _sampling(body, body.logprobs),
        grammar,
        _limit_of(body.max_tokens),
        default_tokens=COMPLETION_MAX_TOKENS,
        num_choices=num_choices,
        num_drawn=num_drawn,
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
        names=_names(field),
        **_common(body),
    )


def delivery_of(body: GenerationBody) -> Delivery:
    """The options of the reply that do not change the answer."""
    tier = "" if body.service_tier is None else FLEX if body.service_tier == FLEX else "default"
    shows_logprobs = body.logprobs is not None and body.logprobs is not False
    shows_timings = bool(body.timings or body.timings_per_token)
    options = body.stream_options or StreamOptions()
    if isinstance(body, ChatBody) and body.usage is not None and body.usage.include:
        options = msgspec.structs.replace(options, include_usage=True)
    shows_scores = body.prompt_logprobs is not None
    return Delivery(bool(body.stream), options, tier, shows_logprobs, shows_scores, shows_timings)


def asks_for_no_limit(body: GenerationBody) -> bool:
    """Whether the client asks for an answer without a token limit."""
    return NO_LIMIT in (body.max_tokens, getattr(body, "max_completion_tokens", None))


def prompts_of(prompt: str | list[Any]) -> tuple[Prompt, ...]:
    """The prompts, from the four forms that OpenAI allows: text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and isinstance(prompt[0], str | list):
        return tuple(one if isinstance(one, str) else _ids(one) for one in prompt)
    return (_ids(prompt),)


def _ids(prompt: Any) -> tuple[int, ...]:
    ids = token_ids_of(prompt)
    if ids is None:
        raise InputError("prompt must be a string, a list of token ids, or a list of these", param="prompt")
    return ids


def _common(body: GenerationBody) -> dict[str, Any]:
    return {
        "min_tokens": body.min_tokens or 0,
        "ignore_eos": bool(body.ignore_eos),
        "stops": stop_strings(body.stop),
        "stop_ids": tuple(body.stop_token_ids or ()),
        "cache": cache_wish(body.cache, body.prompt_cache_key, body.cache_salt),
        "drafts": body.speculation is None or body.speculation.type != "off",
        "expected": _expected(body.prediction),
        "priority": FLEX_PRIORITY if body.service_tier == FLEX else body.priority or 0,
        "keep_alive_s": first_given(keep_alive_s(body.keep_alive, "keep_alive"), keep_alive_s(body.ttl, "ttl")),
    }


def _expected(prediction: PredictionBody | None) -> str:
    if prediction is None:
        return ""
    content = prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _sampling(body: GenerationBody, num_top: int | None) -> SamplingWish:
    penalty, window = repetition_of(first_given(body.repetition_penalty, body.repeat_penalty), body.repeat_last_n)
    return SamplingWish(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=penalty,
        repetition_window=window,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        logprobs=num_top,
    )


def _tool(tool: ToolBody, index: int) -> Tool:
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    if not tool.function.name:
        raise InputError(f"tools[{index}].function.name is empty", param=f"tools[{index}].function.name")
    return Tool(tool.function.name, tool.function.description or "", parameters, f"tools[{index}].function.parameters")


def _choose_tools(body: ChatBody, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """(the tools that the model may call, whether it may or must). Raises InputError."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        if choice == "required" and not tools:
            raise InputError('tool_choice is "required", but there are no tools', param="tool_choice")
        return tools, ToolChoice(choice or "auto")
    if choice.type == "function":
        return tools, ToolChoice("named", _known_name(choice, tools, "tool_choice"))
    allowed = choice.allowed_tools
    listed, mode = (choice.tools, choice.mode) if allowed is None else (allowed.tools, allowed.mode)
    where = "tool_choice" if allowed is None else "tool_choice.allowed_tools"
    if mode is None:
        raise InputError(f"{where}.mode: this field is required", param=f"{where}.mode")
    if not listed:
        raise InputError(f"{where}.tools is empty", param=f"{where}.tools")
    names = {_known_name(tool, tools, f"{where}.tools[{index}]") for index, tool in enumerate(listed)}
    return tuple(tool for tool in tools if tool.name in names), ToolChoice(mode)


def _known_name(chosen: NamedTool | ChatToolChoice, tools: tuple[Tool, ...], where: str) -> str:
    name = chosen.name if chosen.function is None else chosen.function.name
    if name is None:
        raise InputError(f"{where}.function: this field is required", param=f"{where}.function")
    if not any(tool.name == name for tool in tools):
        raise InputError(f"{where} names {show_json(name)}, which is not in tools", param=where)
    return name


def _grammar(body: GenerationBody, response_format: ResponseFormat | None) -> tuple[GrammarSpec | None, str]:
    """The grammar of the answer, and the field that it comes from. Raises InputError if two fields have one."""
    found = [
        (spec, field)
        for spec, field in (
            (_of_response_format(response_format), "response_format"),
            (_of_grammar(body.grammar), "grammar"),
            (_of_structured(body.structured_outputs), "structured_outputs"),
            (_guided("json_schema", body.guided_json or None, "guided_json"), "guided_json"),
            (_guided("regex", body.guided_regex or None, "guided_regex"), "guided_regex"),
            (_guided("choice", body.guided_choice or None, "guided_choice"), "guided_choice"),
            (_guided("lark", body.guided_grammar or None, "guided_grammar"), "guided_grammar"),
        )
        if spec is not None
    ]
    if len(found) > 1:
        message = f"{found[0][1]} and {found[1][1]} contradict each other: send only one of them"
        raise InputError(message, param=found[1][1])
    return found[0] if found else (None, "response_format")


def _of_response_format(wanted: ResponseFormat | None) -> GrammarSpec | None:
    if wanted is None:
        return None
    named, bare = wanted.json_schema, wanted.schema or None
    given = "response_format.json_schema" if named is not None else "response_format.schema"
    if wanted.type == "text":
        if bare is not None or (named is not None and named.schema):
            raise InputError(f'response_format.type is "text", so leave out {given}', param=given)
        return None
    if named is not None and bare is not None:
        message = "response_format.json_schema and response_format.schema are one field: send only one of them"
        raise InputError(message, param="response_format.schema")
    if wanted.type == "json_object":
        return _guided("json_schema", bare or (named and named.schema) or {"type": "object"}, "response_format")
    if named is not None:
        return _guided("json_schema", named.schema or {}, given)
    if wanted.schema is None:
        raise InputError("response_format.json_schema: this field is required", param="response_format.json_schema")
    return _guided("json_schema", bare or {}, given)


def _of_grammar(wanted: str | GrammarBody | None) -> GrammarSpec | None:
    if not wanted:
        return None
    if isinstance(wanted, str):
        message = 'grammar must be an object such as {"type": "lark", "value": "start: …"}; GBNF is not supported'
        raise InputError(message, param="grammar")
    return _guided(wanted.type, wanted.value, "grammar")


def _of_structured(wanted: StructuredOutputs | None) -> GrammarSpec | None:
    if wanted is None:
        return None
    given = [
        spec
        for spec in (
            _guided("json_schema", wanted.json or None, "structured_outputs"),
            _guided("regex", wanted.regex or None, "structured_outputs"),
            _guided("choice", wanted.choice or None, "structured_outputs"),
            _guided("lark", wanted.grammar or None, "structured_outputs"),
            _guided("json_schema", {"type": "object"} if wanted.json_object else None, "structured_outputs"),
        )
        if spec is not None
    ]
    if len(given) > 1:
        message = "structured_outputs must have exactly one of json, regex, choice, grammar and json_object"
        raise InputError(message, param="structured_outputs")
    return given[0] if given else None


def _guided(kind: GrammarKind, value: Any, param: str) -> GrammarSpec | None:
    """The grammar of this kind; None without a value."""
    return None if value is None else grammar_of(kind, value, param)


def _names(grammar: str) -> FieldNames:
    return FieldNames(grammar=grammar, stop_ids="stop_token_ids", variables="chat_template_kwargs")


def _limit_of(wanted: int | None) -> int | None:
    return None if wanted == NO_LIMIT else wanted
