"""The requests that this engine sends to a model server."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from exo_mesh.domain.request import SamplingParams
from exo_mesh.domain.whole.text_pieces import text_of
from exo_mesh.domain.whole.text_request import TextRequest
from exo_mesh.errors import InputError
from exo_mesh_openai.kinds import LLAMA_SERVER, ServerKind

PENALTY_WINDOW = 1 << 16
"""Tokens that llama-server's penalties look back on; its default is 64. Newer versions refuse -1, the whole context."""

CHAT_PATH, PROMPT_PATH = "/v1/chat/completions", "/v1/completions"

_PASSED_ON = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "chat_template_kwargs",
)


class Begin(Enum):
    """How an answer begins. NEW: nothing of it exists. CONTINUE: the server goes on after its beginning. REPEAT: the
    server is asked for the whole answer, and its beginning is compared and dropped."""

    NEW = "new"
    CONTINUE = "continue"
    REPEAT = "repeat"


class Continuing(msgspec.Struct, frozen=True):
    """What a server can go on after, as probed when the model was loaded."""

    text: bool = False
    reasoning: bool = False


def way_to_begin(request: TextRequest, can: Continuing) -> Begin:
    """How to ask for the answer of this request.

    No server goes on in the middle of a tool call, and few in the middle of a thought.
    """
    if not request.begun:
        return Begin.NEW
    kinds = {piece.kind for piece in request.begun}
    if "call" in kinds or not can.text:
        return Begin.REPEAT
    if "text" in kinds or can.reasoning:
        return Begin.CONTINUE
    return Begin.REPEAT


def path_of(request: TextRequest) -> str:
    """The path of the server's API for this request."""
    return PROMPT_PATH if "prompt" in request.body else CHAT_PATH


def body_of(
    kind: ServerKind, served_name: str, request: TextRequest, begin: Begin, can: Continuing, begun_tokens: int = 0
) -> dict[str, Any]:
    """The JSON body that asks for the answer as a stream. begun_tokens: of a beginning that is continued; they count as
    output. Raises InputError for a parameter that this kind of server does not know."""
    is_chat = path_of(request) == CHAT_PATH
    body = _chat(kind, request, begin, can) if is_chat else _prompt(request, begin)
    body |= {
        "model": served_name,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_tokens - begun_tokens,
        **sampling_fields(kind, request.sampling),
    }
    if request.stops:
        # the caller looks for stop strings as well, so that those which are left out here stop the answer too
        body["stop"] = list(request.stops[: kind.most_stops])
    return body


def sampling_fields(kind: ServerKind, sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters in the words of this kind of server; all that it knows, so that none of its own defaults
    applies. Raises InputError for one that it does not know, unless the parameter is off."""
    if sampling.logprobs is not None:
        raise InputError("a model behind a model server gives no logprobs", param="logprobs")
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed % (1 << 31),
    }
    for name, off in (("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        value = getattr(sampling, name)
        if name in kind.sampling:
            fields[kind.sampling[name]] = kind.off.get(name, value) if value == off else value
        elif value != off:
            raise InputError(f"this model is served by {kind.name}, which has no {name}", param=name)
    if sampling.logit_bias:
        if not kind.takes_logit_bias:
            raise InputError(f"this model is served by {kind.name}, which has no logit_bias", param="logit_bias")
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if kind is LLAMA_SERVER and _has_penalty(sampling):
        fields["repeat_last_n"] = sampling.repetition_window or PENALTY_WINDOW
    elif sampling.repetition_window:
        message = f"this model is served by {kind.name}, which has no repeat_last_n: its penalty looks at all tokens"
        raise InputError(message, param="repeat_last_n")
    return fields


def _has_penalty(sampling: SamplingParams) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def _prompt(request: TextRequest, begin: Begin) -> dict[str, Any]:
    prompt = request.body["prompt"]
    if not isinstance(prompt, str):
        raise InputError("the prompt must be one text", param="prompt")
    return {"prompt": prompt + (text_of(request.begun) if begin is Begin.CONTINUE else "")}


def _chat(kind: ServerKind, request: TextRequest, begin: Begin, can: Continuing) -> dict[str, Any]:
    body = {key: request.body[key] for key in _PASSED_ON if request.body.get(key) is not None}
    template_kwargs = _template_kwargs(kind, body)
    if begin is Begin.CONTINUE:
        body["messages"] = [*body.get("messages", ()), _begun_message(request, can)]
        body |= {"continue_final_message": True, "add_generation_prompt": False}
        if text_of(request.begun, "reasoning") and not can.reasoning:
            # the thought is complete, and a server that expects one would take the rest of the text for it
            template_kwargs = {**template_kwargs, "enable_thinking": False}
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    return body


def _begun_message(request: TextRequest, can: Continuing) -> dict[str, str]:
    """The beginning of the answer as the last message."""
    message = {"role": "assistant", "content": text_of(request.begun)}
    if can.reasoning and (thought := text_of(request.begun, "reasoning")):
        message["reasoning_content"] = thought
    return message


def _template_kwargs(kind: ServerKind, body: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template. llama-server reads the reasoning effort from there only."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise InputError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    if given and not kind.takes_template_kwargs:
        raise InputError(
            f"this model is served by {kind.name}, which has no chat_template_kwargs", param="chat_template_kwargs"
        )
    effort = body.get("reasoning_effort")
    return {"reasoning_effort": effort, **given} if kind is LLAMA_SERVER and effort is not None else dict(given)
