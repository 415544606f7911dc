"""An empty value changes nothing, whether its field is known or not, in every dialect; 5.0 is the integer 5."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.api.anthropic.schema import CountTokensBody, MessagesBody, decode_count_body, decode_messages_body
from exo_mesh.api.anthropic.translate import neutral_conversation as anthropic_conversation
from exo_mesh.api.anthropic.translate import neutral_message
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.embedding.embeddings import NEUTRAL as EMBEDDING_NEUTRAL
from exo_mesh.api.embedding.embeddings import inputs_of
from exo_mesh.api.embedding.rerank import NEUTRAL as RERANK_NEUTRAL
from exo_mesh.api.embedding.schema import EmbeddingsBody, RerankBody
from exo_mesh.api.ollama.lenient import decode_ollama_body
from exo_mesh.api.ollama.schema import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
)
from exo_mesh.api.ollama.translate import neutral_chat as ollama_chat
from exo_mesh.api.ollama.translate import neutral_generate as ollama_generate
from exo_mesh.api.openai.checks import check_body
from exo_mesh.api.openai.schema import ChatBody, CompletionBody, decode_generation_body
from exo_mesh.api.openai.translate import neutral_chat, neutral_completion
from exo_mesh.api.responses.schema import (
    InputTokensBody,
    ResponsesBody,
    decode_input_tokens_body,
    decode_responses_body,
)
from exo_mesh.api.responses.translate import (
    PlacedItems,
    input_items,
    neutral_conversation,
    neutral_response,
)
from exo_mesh.errors import InputError

EMPTY: list[Any] = [None, "", False, [], {}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _chat(body: bytes) -> Any:
    decoded = decode_generation_body(body, ChatBody)
    check_body(decoded)
    return neutral_chat(decoded)


def _completion(body: bytes) -> Any:
    decoded = decode_generation_body(body, CompletionBody)
    check_body(decoded)
    return neutral_completion(decoded)


def _response(body: bytes) -> Any:
    decoded = decode_responses_body(body)
    return neutral_response(decoded, PlacedItems([], input_items(decoded)))


def _input_tokens(body: bytes) -> Any:
    decoded = decode_input_tokens_body(body)
    return neutral_conversation(decoded, PlacedItems([], input_items(decoded)))


def _embeddings(body: bytes) -> Any:
    return inputs_of(decode_body(body, EmbeddingsBody, {EmbeddingsBody: EMBEDDING_NEUTRAL}).input)


DIALECTS: dict[str, tuple[Callable[[bytes], Any], type[msgspec.Struct], dict[str, Any]]] = {
    "chat": (
        _chat,
        ChatBody,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a", "tool_calls": [CALL]},
                {"role": "tool", "content": "r", "tool_call_id": "c"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "thinking": {"type": "enabled"},
            "stream": True,
            "stream_options": {"include_usage": True},
            "usage": {"include": True},
        },
    ),
    "completion": (_completion, CompletionBody, {"prompt": "p", "stream": True, "stream_options": {}}),
    "responses": (
        _response,
        ResponsesBody,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "stream_options": {"include_obfuscation": False},
        },
    ),
    "input tokens": (_input_tokens, InputTokensBody, {"input": "i"}),
    "messages": (
        lambda body: neutral_message(decode_messages_body(body)),
        MessagesBody,
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        },
    ),
    "count": (
        lambda body: anthropic_conversation(decode_count_body(body)),
        CountTokensBody,
        {"messages": [{"role": "user", "content": "u"}]},
    ),
    "ollama chat": (
        lambda body: ollama_chat(decode_ollama_body(body, OllamaChatBody)),
        OllamaChatBody,
        {
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
                {"role": "tool", "content": "r"},
            ],
            "tools": [TOOL],
            "options": {"temperature": 1},
        },
    ),
    "ollama generate": (
        lambda body: ollama_generate(decode_ollama_body(body, OllamaGenerateBody)),
        OllamaGenerateBody,
        {"prompt": "p", "options": {"temperature": 1}},
    ),
    "ollama embed": (lambda body: decode_ollama_body(body, OllamaEmbedBody), OllamaEmbedBody, {"input": "i"}),
    "ollama embeddings": (
        lambda body: decode_ollama_body(body, OllamaEmbeddingsBody),
        OllamaEmbeddingsBody,
        {"prompt": "p"},
    ),
    "ollama show": (lambda body: decode_ollama_body(body, OllamaShowBody), OllamaShowBody, {"model": "m"}),
    "ollama pull": (lambda body: decode_ollama_body(body, OllamaPullBody), OllamaPullBody, {"model": "m"}),
    "embeddings": (_embeddings, EmbeddingsBody, {"input": "i"}),
    "rerank": (
        lambda body: decode_body(body, RerankBody, {RerankBody: RERANK_NEUTRAL}),
        RerankBody,
        {"query": "q", "documents": ["d"]},
    ),
}

_FREE = ("parameters", "schema", "input_schema", "input", "arguments")
"""Fields whose objects are the client's own, in which an unknown key means something."""


def _objects(body: Any) -> Iterator[dict[str, Any]]:
    """The body and all objects in it whose fields the API defines."""
    if isinstance(body, dict):
        yield body
        for name, value in body.items():
            if name not in _FREE or isinstance(value, list):
                yield from _objects(value)
    elif isinstance(body, list):
        for value in body:
            yield from _objects(value)


def _each_with(body: dict[str, Any], name: str, value: Any) -> Iterator[dict[str, Any]]:
    """The body with the field in each of its objects, one at a time."""
    for index in range(len(list(_objects(body)))):
        made = copy.deepcopy(body)
        list(_objects(made))[index][name] = value
        yield made


def _error(decode: Callable[[bytes], Any], body: dict[str, Any]) -> InputError | None:
    try:
        decode(json.dumps(body).encode())
    except InputError as exc:
        return exc
    return None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_empty_value_of_an_unknown_field_changes_nothing_at_any_depth(dialect: str) -> None:
    decode, _, body = DIALECTS[dialect]
    plain = decode(json.dumps(body).encode())
    for value in EMPTY:
        for made in _each_with(body, "x_unknown", value):
            assert decode(json.dumps(made).encode()) == plain, made


@settings(max_examples=int(os.environ.get("NEUTRAL_CASES", "100")), deadline=None)
@given(
    dialect=st.sampled_from(sorted(DIALECTS)),
    added=st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abcde"), st.sampled_from(EMPTY)), max_size=12),
    as_floats=st.booleans(),
)
def test_any_number_of_empty_unknown_fields_and_integral_numbers_changes_nothing(
    dialect: str, added: list[tuple[int, str, Any]], as_floats: bool
) -> None:
    decode, _, body = DIALECTS[dialect]
    made = _with_floats(body) if as_floats else copy.deepcopy(body)
    objects = list(_objects(made))
    for place, name, value in added:
        objects[place % len(objects)][f"x_{name}"] = value
    assert decode(json.dumps(made).encode()) == decode(json.dumps(body).encode())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_any_other_value_of_an_unknown_field_is_refused_by_its_name(dialect: str) -> None:
    decode, _, body = DIALECTS[dialect]
    for value in [0, 1, True, "x", [0], [None], {"a": None}]:
        error = _error(decode, {**body, "x_unknown": value})
        assert error is not None and error.param == "x_unknown", value


def _known_fields(kind: Any, value: Any) -> Iterator[tuple[dict[str, Any], msgspec.structs.FieldInfo]]:
    """Each optional field of the body and of the objects in it that the body lacks, with its object."""
    for one in get_args(kind) or (kind,):
        if isinstance(value, list) and get_origin(one) is list:
            for part in value:
                yield from _known_fields(get_args(one)[0], part)
        if isinstance(value, dict) and isinstance(one, type) and issubclass(one, msgspec.Struct):
            for field in msgspec.structs.fields(one):
                if field.encode_name in value:
                    yield from _known_fields(field.type, value[field.encode_name])
                elif not field.required:
                    yield value, field


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_empty_value_of_a_known_field_is_never_an_error(dialect: str) -> None:
    decode, kind, body = DIALECTS[dialect]
    made = copy.deepcopy(body)
    wrong = []
    for place, field in list(_known_fields(kind, made)):
        for value in (None, "", [], {}):
            place[field.encode_name] = value
            if (error := _error(decode, made)) is not None:
                wrong.append((field.encode_name, value, str(error)))
            del place[field.encode_name]
    assert wrong == []


OFF = [
    *(("chat", name) for name in ("thinking", "reasoning", "reasoning_effort", "cache", "tool_choice", "do_sample")),
    *(("completion", name) for name in ("thinking", "reasoning", "reasoning_effort", "do_sample", "think")),
    *(("responses", name) for name in ("enable_thinking", "think", "thinking", "reasoning", "tool_choice")),
    *(("messages", name) for name in ("cache", "parallel_tool_calls", "thinking", "tool_choice", "reasoning")),
    *(("embeddings", name) for name in ("normalized", "use_activation")),
    *(("rerank", name) for name in ("activation", "use_activation")),
    *(("ollama chat", name) for name in ("thinking", "enable_thinking", "reasoning")),
]


@pytest.mark.parametrize(("dialect", "name"), OFF)
def test_false_that_would_turn_something_off_is_refused_by_its_name(dialect: str, name: str) -> None:
    decode, _, body = DIALECTS[dialect]
    error = _error(decode, {**body, name: False})
    assert error is not None and error.param == name
    assert _error(decode, {**body, name: None}) is None


@pytest.mark.parametrize(
    ("dialect", "name"),
    [("chat", "think"), ("chat", "enable_thinking"), ("chat", "parallel_tool_calls"), ("chat", "logprobs"),
     ("completion", "logprobs"), ("completion", "stop"), ("ollama chat", "think")],
)  # fmt: skip
def test_false_is_accepted_where_it_is_honoured_or_the_default(dialect: str, name: str) -> None:
    decode, _, body = DIALECTS[dialect]
    assert _error(decode, {**body, name: False}) is None


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("chat", {"service_tier": "flex", "priority": 0}),
        ("chat", {"metadata": {"a": None}}),
        ("chat", {"metadata": {"a": 1}}),
        ("responses", {"metadata": {"a": None, "b": 1}}),
        ("responses", {"tools": [{"type": "function", **FUNCTION, "allowed_callers": []}]}),
        ("messages", {"tools": [{"name": "f", "input_schema": SCHEMA, "allowed_callers": [], "type": ""}]}),
        ("chat", {"response_format": {"type": "text", "json_schema": {}}}),
    ],
)
def test_a_value_that_means_the_default_is_accepted(dialect: str, fields: dict[str, Any]) -> None:
    decode, _, body = DIALECTS[dialect]
    assert _error(decode, {**body, **fields}) is None


@pytest.mark.parametrize(
    "wanted",
    [{"json_schema": {}}, {"schema": None}, {"json_schema": {"schema": None}}, {"json_schema": {"schema": {}}}],
)
def test_a_json_object_without_a_schema_is_an_object(wanted: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "u"}], "response_format": {"type": "json_object", **wanted}}
    assert json.loads(_chat(json.dumps(body).encode()).grammar.text) == {"type": "object"}


def test_a_schema_beside_plain_text_is_refused_in_responses() -> None:
    error = _error(_response, {"input": "i", "text": {"format": {"type": "text", "schema": SCHEMA}}})
    assert error is not None and error.param == "text.format.schema"


def test_a_value_that_is_no_default_is_never_dropped_as_empty() -> None:
    for name in ("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "include_reasoning"):
        error = _error(_chat, {"messages": [{"role": "user", "content": "u"}], name: False})
        assert error is not None and "it must be true" in str(error)
    error = _error(_chat, {"messages": [{"role": "user", "content": "u"}], "web_search_options": {}})
    assert error is not None and error.param == "web_search_options"


USER = {"role": "user", "content": "u"}
INTEGERS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"messages": [USER], "max_tokens": 5, "seed": 7, "n": 2, "top_k": 3, "stop_token_ids": [1, 2]}),
    (
        "chat",
        {"messages": [USER], "logprobs": True, "top_logprobs": 2, "thinking": {"type": "enabled", "budget_tokens": 9}},
    ),
    ("completion", {"prompt": [1, 2], "max_tokens": 5, "logprobs": 1, "best_of": 2}),
    ("completion", {"prompt": [[1, 2], [3]], "max_tokens": 5}),
    ("responses", {"input": "i", "max_output_tokens": 5, "seed": 7, "reasoning": {"max_tokens": 3}}),
    ("messages", {"messages": [USER], "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("ollama chat", {"messages": [USER], "options": {"num_ctx": 4096, "num_predict": 5, "seed": 7, "top_k": 3}}),
    ("ollama generate", {"prompt": "p", "logprobs": True, "top_logprobs": 2, "options": {"num_ctx": 4096}}),
    ("ollama embed", {"input": "i", "dimensions": 64}),
    ("embeddings", {"input": [1, 2, 3], "dimensions": 64}),
    ("embeddings", {"input": [[1, 2], [3]]}),
    ("rerank", {"query": "q", "documents": ["d"], "top_n": 1}),
]


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_floats(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize(("dialect", "body"), INTEGERS)
def test_an_integral_number_is_an_integer(dialect: str, body: dict[str, Any]) -> None:
    decode = DIALECTS[dialect][0]
    assert decode(json.dumps(_with_floats(body)).encode()) == decode(json.dumps(body).encode())


def test_a_number_with_a_fraction_is_not_cut_to_an_integer() -> None:
    for value in (5.5, 1e-3, -0.5):
        error = _error(_chat, {"messages": [USER], "max_tokens": value})
        assert error is not None and error.param == "max_tokens"


@pytest.mark.parametrize(
    ("text", "shown", "place"),
    [
        ("\\ud800", "\\ud800", 2),
        ("\\ud83dabcdefghijk", "\\ud83d", 2),
        ("\\udc00", "\\udc00", 2),
        ("a\\\\\\ud83d\\u0041", "\\ud83d", 5),
        ("\\ud83d\\ude00 \\uDBFF", "\\uDBFF", 15),
    ],
)
def test_half_of_a_character_is_named_with_its_place(text: str, shown: str, place: int) -> None:
    with pytest.raises(InputError) as caught:
        _chat(f'["{text}"]'.encode())
    assert f"{shown} (byte {place}) is half of a surrogate pair" in str(caught.value)


def test_a_pair_of_surrogates_is_a_character() -> None:
    request = _completion(b'{"prompt": "\\ud83d\\ude00 \\\\ud83d"}')
    assert request.subject.prompts == ("\U0001f600 \\ud83d",)
