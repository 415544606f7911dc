"""Translates bodies of responses to neutral requests. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from exo_mesh.api.core.checks import check_range, check_stops, stop_strings
from exo_mesh.api.core.grammar import grammar_of
from exo_mesh.api.core.keeping import cache_wish, keep_alive_s
from exo_mesh.api.core.neutral_fields import refuse_unless, show_json
from exo_mesh.api.core.request import Conversation, FieldNames, NeutralRequest, SamplingWish, Thinking, Turn
from exo_mesh.api.responses.schema import InputTokensBody, Item, ResponsesBody, TextForm
from exo_mesh.api.responses.tools import choose_tools, neutral_tools
from exo_mesh.api.responses.turns import turns_of
from exo_mesh.domain.request import FLEX_PRIORITY, GrammarSpec
from exo_mesh.errors import InputError

NAMES = FieldNames(
    messages="input", max_tokens="max_output_tokens", grammar="text.format", variables="chat_template_kwargs"
)

FLEX = "flex"
MAX_TOP_LOGPROBS = 20
_MOST = 2**31 - 1
_INT64 = 2**63

LOGPROBS = "message.output_text.logprobs"
OPAQUE = "reasoning.encrypted_content"
INCLUDABLE = (
    LOGPROBS,
    OPAQUE,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What a client may ask for. All but the first two are about hosted tools and images, which no response has."""

_RANGES: dict[str, tuple[float, float]] = {
    "max_output_tokens": (1, _MOST),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "top_k": (-1, _MOST),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-_INT64, _INT64 - 1),
}


class PlacedItems(msgspec.Struct, frozen=True):
    """The items of a conversation, in order. history: items before the request. own: items of the request. references
    are resolved."""

    history: Sequence[Item]
    own: Sequence[Item]


def input_items(body: InputTokensBody) -> list[Item]:
    """The items of a body's input; a text is a message of the user. Raises InputError if there are none."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    if not body.input and not body.instructions and not body.previous_response_id:
        raise InputError("input is empty; at least one item is required", param="input")
    return list(body.input or ())


def neutral_response(body: ResponsesBody, items: PlacedItems) -> NeutralRequest:
    """Translate and check a body. Raises InputError that names the wrong field."""
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(body, name), low, high)
    stops = stop_strings(body.stop)
    check_stops(stops, "stop")
    if body.stream_options is not None:
        refuse_unless("stream_options.include_obfuscation", body.stream_options.include_obfuscation, (False,))
    for index, wanted in enumerate(body.include or ()):
        if wanted not in INCLUDABLE:
            message = f"include[{index}] is {show_json(wanted)}; allowed are {', '.join(INCLUDABLE)}"
            raise InputError(message, param="include")
    keep = keep_alive_s(body.keep_alive, "keep_alive")
    return NeutralRequest(
        body.model,
        neutral_conversation(body, items),
        _sampling(body),
        _grammar(body.text.format if body.text else None),
        body.max_output_tokens,
        stops=stops,
        priority=FLEX_PRIORITY if body.service_tier == FLEX else 0,
        cache=cache_wish(body.cache, body.prompt_cache_key),
        keep_alive_s=keep_alive_s(body.ttl, "ttl") if keep is None else keep,
        names=NAMES,
    )


def neutral_conversation(body: InputTokensBody, items: PlacedItems) -> Conversation:
    """Translate the conversation of a body. Raises InputError that names the wrong field."""
    refuse_unless("truncation", body.truncation or None, ("disabled", "auto"))
    tools, choice = choose_tools(body.tool_choice or None, neutral_tools(body.tools or ())[0])
    first = (Turn("system", body.instructions, "instructions"),) if body.instructions else ()
    placed = [(item, "previous_response_id") for item in items.history]
    placed += [(item, f"input[{index}]") for index, item in enumerate(items.own)]
    return Conversation(
        (*first, *turns_of(placed)),
        tools,
        choice,
        body.parallel_tool_calls is not False,
        _thinking(body),
        dict(body.chat_template_kwargs or {}),
        drops_oldest=body.truncation == "auto",
    )


def shows_logprobs(body: ResponsesBody) -> bool:
    """Whether the client wants log-probabilities of the text."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def _thinking(body: InputTokensBody) -> Thinking:
    if body.reasoning is None:
        return Thinking()
    check_range("reasoning.max_tokens", body.reasoning.max_tokens, 0, _MOST)
    return Thinking(None, body.reasoning.effort, body.reasoning.max_tokens)


def _sampling(body: ResponsesBody) -> SamplingWish:
    return SamplingWish(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        logprobs=(body.top_logprobs or 0) if shows_logprobs(body) else None,
    )


def _grammar(form: TextForm | None) -> GrammarSpec | None:
    if form is None or form.type == "text":
        if form is not None and form.schema:
            message = 'text.format.type is "text", so leave out text.format.schema'
            raise InputError(message, param="text.format.schema")
        return None
    if form.type == "json_object" and not form.schema:
        return GrammarSpec("json_schema", '{"type": "object"}')
    if form.schema is None:
        raise InputError("text.format.schema: this field is required", param="text.format.schema")
    return grammar_of("json_schema", form.schema, "text.format.schema")


def repeated_fields(body: ResponsesBody, temperature: float, top_p: float, *, is_stored: bool) -> dict[str, Any]:
    """The fields of a reply that repeat the request, as JSON values. temperature, top_p: those in force."""
    form = body.text.format if body.text else None
    reasoning = body.reasoning
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": _labels(body.metadata or {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id or None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": FLEX if body.service_tier == FLEX else "default",
        "store": is_stored,
        "temperature": temperature,
        "text": {
            "format": {"type": "text"} if form is None else _shown_form(form),
            "verbosity": (body.text.verbosity if body.text else None) or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _shown_form(form: TextForm) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    name = form.name or "answer"
    return {
        "type": form.type,
        "name": name,
        "description": form.description,
        "schema": form.schema,
        "strict": bool(form.strict),
    }


def _labels(metadata: dict[str, Any]) -> dict[str, str]:
    """Metadata as texts, as the reply's type wants them."""
    found = {name: value for name, value in metadata.items() if value is not None}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": False, **tool} if tool.get("type") == "function" else tool
