"""Checks the ranges and choices of request fields: pure functions that raise InputError."""

from __future__ import annotations

from typing import Any

import msgspec

from exo_mesh.api.core.checks import check_num_tools, check_range, check_stops, stop_strings
from exo_mesh.api.core.neutral_fields import refuse_unless, show_json
from exo_mesh.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from exo_mesh.errors import InputError

MAX_STOP_IDS = 64
MAX_CHOICES = 128
"""Most answers of one request, over all of its prompts; OpenAI's limit for n."""

MAX_TOP_LOGPROBS = 20
_INT64 = 2**63

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "repeat_penalty": (0.01, 10),
    "repeat_last_n": (-1, 2**31 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-_INT64, _INT64 - 1),
    "min_tokens": (0, 2**31 - 1),
    "priority": (-10, 10),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
    "thinking_budget": (0, 2**31 - 1),
    "thinking_token_budget": (0, 2**31 - 1),
}
_LIMITS = ("max_tokens", "max_completion_tokens")
NO_LIMIT = -1
"""The value that llama.cpp, LM Studio and Ollama use for an answer without a limit."""

# Fields with these values have no effect; any other value would have to change the reply, so it is refused.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
}


def check_body(body: GenerationBody) -> None:
    """Check all that does not need the model. Raises InputError with the field, its value and the allowed values."""
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(body, name, None), low, high)
    for name in _LIMITS:
        limit = getattr(body, name, None)
        if limit == 0 and isinstance(body, CompletionBody) and body.echo:
            continue  # the client wants only the prompt and its log-probabilities
        if limit is not None and limit != NO_LIMIT and not 1 <= limit < 2**31:
            text = f"{name} is {show_json(limit)}; it must be between 1 and {2**31 - 1}, or {NO_LIMIT} for no limit"
            raise InputError(text, param=name)
    for name, allowed in _CHOICES.items():
        refuse_unless(name, getattr(body, name, None), allowed)
    if None not in (body.repeat_penalty, body.repetition_penalty) and body.repeat_penalty != body.repetition_penalty:
        message = "repeat_penalty and repetition_penalty are two names of the same field: send only one"
        raise InputError(message, param="repeat_penalty")
    check_stops(stop_strings(body.stop), "stop")
    if len(body.stop_token_ids or ()) > MAX_STOP_IDS:
        message = f"stop_token_ids has {len(body.stop_token_ids or ())} ids; at most {MAX_STOP_IDS} are allowed"
        raise InputError(message, param="stop_token_ids")
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs cannot be streamed; use /v1/completions with echo and logprobs to stream them"
        raise InputError(message, param="prompt_logprobs")
    if body.service_tier == "flex" and body.priority:
        raise InputError('service_tier is "flex", the lowest priority of all: leave out priority', param="priority")
    _check_bias(body.logit_bias)
    _check_stream_options(body)
    if isinstance(body, ChatBody):
        _check_chat(body)
    elif isinstance(body, CompletionBody):
        _check_logprobs_count(body.logprobs)
        _check_best_of(body)


def _check_bias(logit_bias: dict[int, float] | None) -> None:
    for token_id, bias in (logit_bias or {}).items():
        if not -100 <= bias <= 100:
            raise InputError(
                f"logit_bias of token {token_id} is {show_json(bias)}; it must be between -100 and 100",
                param="logit_bias",
            )


def _check_stream_options(body: GenerationBody) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream and any(value for value in msgspec.structs.astuple(options)):
        raise InputError('stream_options is only allowed together with "stream": true', param="stream_options")
    if options.include_obfuscation:
        raise InputError(
            "stream_options.include_obfuscation is true, which is not supported yet; it must be false",
            param="stream_options.include_obfuscation",
        )


def _check_chat(body: ChatBody) -> None:
    if not body.messages:
        raise InputError("messages is empty; at least one message is required", param="messages")
    check_num_tools(body.tools or ())
    if body.top_logprobs and not body.logprobs:
        raise InputError('top_logprobs is only allowed together with "logprobs": true', param="top_logprobs")
    _check_thinking(body)
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    if body.messages[-1].role != "assistant":
        raise InputError(
            "continue_final_message is true, so the last message must have the role assistant, "
            f"not {body.messages[-1].role}",
            param="continue_final_message",
        )
    if body.messages[-1].tool_calls:
        text = "continue_final_message is true, but the last message has tool calls, so no answer can continue it"
        raise InputError(text, param="continue_final_message")


def _check_thinking(body: ChatBody) -> None:
    if body.reasoning is not None and body.reasoning.exclude:
        message = "reasoning.exclude is true, which is not supported yet; it must be false"
        raise InputError(message, param="reasoning.exclude")
    budgets = {
        "reasoning.max_tokens": body.reasoning.max_tokens if body.reasoning else None,
        "thinking.budget_tokens": body.thinking.budget_tokens if body.thinking else None,
    }
    for name, value in budgets.items():
        check_range(name, value, 0, 2**31 - 1)


def _check_logprobs_count(logprobs: int | None) -> None:
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise InputError(f"logprobs is {logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}", param="logprobs")


def _check_best_of(body: CompletionBody) -> None:
    if body.best_of is None or body.best_of <= (body.n or 1):
        if body.best_of is not None and body.best_of < (body.n or 1):
            raise InputError(f"best_of is {body.best_of}; it must be at least n, which is {body.n}", param="best_of")
        return
    if body.stream:
        message = "best_of cannot be streamed: the best texts are known only at the end"
        raise InputError(message, param="best_of")
