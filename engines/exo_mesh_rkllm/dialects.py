"""The HTTP interfaces of RKLLAMA's versions, and the requests in each. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from exo_mesh.domain.request import SamplingParams
from exo_mesh.domain.whole.text_request import TextRequest
from exo_mesh.errors import InputError


class Dialect(StrEnum):
    """An HTTP interface. A server may have several; the first one here that it has is used.

    OLLAMA: /api/tags, /api/chat, /api/generate; an answer is a line of JSON for each token. OPENAI: /v1/models,
    /v1/chat/completions, /v1/completions; the same as server-sent events, and arguments of tool calls that may not be
    JSON. NATIVE, of servers before 2025: /models, /load_model, /generate. DOCUMENTED: /health, /model/load, and a
    /generate that gives all tokens at once.
    """

    OLLAMA = "ollama"
    OPENAI = "openai"
    NATIVE = "native"
    DOCUMENTED = "documented"


_PATHS = {
    Dialect.OLLAMA: ("/api/chat", "/api/generate"),
    Dialect.OPENAI: ("/v1/chat/completions", "/v1/completions"),
    Dialect.NATIVE: ("/generate", "/generate"),
    Dialect.DOCUMENTED: ("/generate", "/generate"),
}

TEMPLATE_MARKERS = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<|assistant|>", "<｜User｜>",
    "<|endoftext|>",
)  # fmt: skip
"""What chat templates write. A prompt with one of them has been through a template already."""


def answer_path(dialect: Dialect, request: TextRequest) -> str:
    """The path that a request is sent to."""
    chat, prompt = _PATHS[dialect]
    return chat if "messages" in request.body else prompt


def answer_body(dialect: Dialect, model: str, request: TextRequest) -> dict[str, Any]:
    """The body of a request. model: the server's name of it. Raises InputError, naming the parameter, for what RKLLAMA
    cannot do."""
    _refuse_impossible(request)
    thinks = _thinks(request.body)
    if "messages" not in request.body:
        return _of_prompt(dialect, model, request, thinks)
    messages = [_message(message) for message in request.body["messages"]]
    tools = _tools(request.body)
    if dialect in (Dialect.NATIVE, Dialect.DOCUMENTED):
        if tools:
            raise InputError("this version of RKLLAMA has no tools: update it, or leave them out", param="tools")
        return _plain_body(dialect, model, messages, request.max_tokens)
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True, **_limits(dialect, request)}
    if tools:
        body["tools"] = tools
    if thinks is not None:
        body["think"] = thinks
    return body


def _of_prompt(dialect: Dialect, model: str, request: TextRequest, thinks: bool | None) -> dict[str, Any]:
    prompt = request.body["prompt"]
    marker = next((marker for marker in TEMPLATE_MARKERS if marker in prompt), None)
    if marker is not None:
        raise InputError(
            f"the prompt has {json.dumps(marker, ensure_ascii=False)}, which a chat template writes, and RKLLAMA "
            "applies the model's template to each prompt: send messages to /v1/chat/completions",
            param="prompt",
        )
    if dialect in (Dialect.NATIVE, Dialect.DOCUMENTED):
        return _plain_body(dialect, model, [{"role": "user", "content": prompt}], request.max_tokens)
    body: dict[str, Any] = {"model": model, "prompt": prompt, "stream": True, **_limits(dialect, request)}
    return body if thinks is None else {**body, "think": thinks}


def _plain_body(dialect: Dialect, model: str, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """A body for a server without sampling parameters."""
    if dialect is Dialect.NATIVE:
        return {"messages": messages, "stream": True}
    only = messages[0]["content"] if len(messages) == 1 else ""
    prompt = only or "\n".join([*(f"{one['role']}: {one['content']}" for one in messages), "assistant:"])
    return {"model": model, "prompt": prompt, "messages": messages, "max_tokens": max_tokens}


def _limits(dialect: Dialect, request: TextRequest) -> dict[str, Any]:
    """Sampling parameters and the token limit. All are sent, because the Modelfile has other defaults."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    values = {
        # a temperature of 0 divides by zero in some runtimes; one candidate is greedy at any temperature
        "temperature": 1.0 if greedy else sampling.temperature,
        "top_k": 1 if greedy else sampling.top_k,
        "top_p": 1.0 if greedy else sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if dialect is Dialect.OPENAI:
        if sampling.repetition_penalty != 1:
            raise InputError(
                "this version of RKLLAMA has no repetition_penalty: update it, or leave it out",
                param="repetition_penalty",
            )
        return {**values, "max_tokens": request.max_tokens}
    return {
        "options": {**values, "repeat_penalty": sampling.repetition_penalty, "num_predict": request.max_tokens},
    }


def _refuse_impossible(request: TextRequest) -> None:
    """Raises InputError for parameters that RKLLAMA accepts and ignores. A seed changes nothing in a greedy answer."""
    sampling: SamplingParams = request.sampling
    if "seed" in request.body and sampling.temperature > 0 and sampling.top_k != 1:
        raise InputError("RKLLAMA has no seed; leave it out, or set temperature to 0", param="seed")
    if sampling.logit_bias:
        raise InputError("RKLLAMA has no logit_bias; leave it out", param="logit_bias")
    if sampling.repetition_window:
        raise InputError("RKLLAMA has no repeat_last_n; leave it out", param="repeat_last_n")
    if sampling.logprobs is not None:
        raise InputError("RKLLAMA has no logprobs; leave them out", param="logprobs")
    if sampling.min_p > 0:
        raise InputError("RKLLAMA has no min_p; leave it out", param="min_p")
    kind = (request.body.get("response_format") or {}).get("type", "text")
    if kind != "text":
        raise InputError(
            f"RKLLAMA cannot force the format {json.dumps(kind)}: ask for it in a message", param="response_format"
        )


def _thinks(body: Mapping[str, Any]) -> bool | None:
    """Whether the model shall think first; None if the request leaves it to the Modelfile."""
    variables = dict(body.get("chat_template_kwargs") or {})
    thinks = variables.pop("enable_thinking", None)
    thinks = variables.pop("thinking", thinks)
    if variables:
        raise InputError(
            f"RKLLAMA does not pass {json.dumps(next(iter(variables)))} to chat templates; only enable_thinking",
            param="chat_template_kwargs",
        )
    effort = body.get("reasoning_effort")
    if thinks is None and effort is not None:
        return bool(effort != "none")
    return None if thinks is None else bool(thinks)


def _tools(body: Mapping[str, Any]) -> list[Any]:
    tools, choice = list(body.get("tools") or ()), body.get("tool_choice", "auto")
    if choice == "none":
        return []
    if tools and choice not in (None, "auto"):
        raise InputError('RKLLAMA cannot force a tool call: tool_choice may be "auto" or "none"', param="tool_choice")
    return tools


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role", "user")
    made = {"role": "system" if role == "developer" else role, "content": _text(message.get("content"))}
    for key in ("name", "tool_call_id"):
        if key in message:
            made[key] = message[key]
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_past_call(call) for call in calls]
    return made


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise InputError(
                f"content parts of type {json.dumps(part.get('type'))} are not supported by this engine; only 'text' "
                "is",
                param="messages",
            )
    return "".join(str(part.get("text", "")) for part in content)


def _past_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call of an earlier answer. Chat templates expect its arguments as an object."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # the client sent what a model wrote; the template shows it as it is
            function["arguments"] = json.loads(arguments or "{}")
    return {**{key: call[key] for key in ("id", "type") if key in call}, "function": function}
