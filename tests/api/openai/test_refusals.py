"""Every field is honoured or refused by name; no input, however broken, is a 5xx."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exo_mesh.api.decoding import decode_body
from exo_mesh.api.openai.checks import check_body
from exo_mesh.api.openai.schema import ChatBody, CompletionBody, decode_generation_body
from exo_mesh.api.placement_options import InstanceBody
from exo_mesh.errors import InputError
from tests.api.scripted_mesh import Served

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 2.1}, "temperature", "2.1 between 0 and 2"),
        ({"temperature": -0.1}, "temperature", "between 0 and 2"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"temperature": True}, "temperature", "got `bool`"),
        ({"top_p": 1.1}, "top_p", "between 0 and 1"),
        ({"top_k": -2}, "top_k", "-2 between -1"),
        ({"min_p": -1}, "min_p", "between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01 and 10"),
        ({"presence_penalty": 3}, "presence_penalty", "-2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-2 and 2"),
        ({"max_tokens": 0}, "max_tokens", "between 1"),
        ({"max_completion_tokens": -5}, "max_completion_tokens", "-5"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9 at most 8"),
        ({"seed": 2**63}, "seed", str(2**63)),
        ({"seed": 10**4000}, "seed", ""),
        ({"n": 0}, "n", "0 between 1 and 128"),
        ({"n": True}, "n", "bool"),
        ({"stop": ["a"] * 65}, "stop", "65 at most 64"),
        ({"stop": "x" * 1025}, "stop", "1025 characters"),
        ({"stop": "x" * 1025}, "stop", "1025"),
        ({"stop": [1]}, "stop[0]", "got `int`"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "int"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
        ({"top_logprobs": 3}, "top_logprobs", '"logprobs": true'),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", '"stream": true'),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not support"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "true",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "text", "schema": {"type": "null"}}}, "response_format.schema", "leave out"),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}, "json_schema": {}}},
            "response_format.schema",
            "only one",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": schema({"type": "string", "format": "shoe-size"})}, "response_format", "format"),
        ({"response_format": schema({"$ref": "https://example.com/x"})}, "response_format", "$ref"),
        ({"response_format": schema({}), "guided_regex": "a"}, "guided_regex", "response_format contradict"),
        ({"grammar": "root ::= x"}, "grammar", "GBNF lark"),
        ({"grammar": {"type": "regex", "value": "("}}, "grammar", "regex grammar"),
        ({"grammar": {"type": "choice", "value": []}}, "grammar", "list of strings"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [TOOL]}, "tools", "template does not support tools"),
        ({"tools": [TOOL] * 513}, "tools", "513 at most 512"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", '"g"'),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"thinking_budget": -1}, "thinking_budget", "between 0"),
        ({"service_tier": 1}, "service_tier", "`int`"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
        ({"verbosity": "loud"}, "verbosity", "loud"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"metadata": [1]}, "metadata", "array"),
        ({"temprature": 1}, "temprature", "not support mean temperature?"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": None}, "messages", "null"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": "x", "shout": 1}]}, "messages[0].shout", "not support"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
            "data URL",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "text"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1].tool_calls", "template"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "role assistant"),
        ({"continue_final_message": True}, "continue_final_message", "assistant user"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}], "continue_final_message": True},
            "continue_final_message",
            "tool calls",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both"),
    ],
)
async def test_what_is_refused_is_named(api: Served, fields: dict[str, Any], param: str, words: str) -> None:
    async with api.http.post("/v1/chat/completions", json={"messages": [USER], **fields}) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request")
    assert error["param"] == param
    assert all(word in error["message"] for word in words.split()), error["message"]
    assert param.partition("[")[0].partition(".")[0] in error["message"]
    assert api.mesh.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True},
        {"verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "s", "reasoning_effort": "none"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "n": 1, "stop": []},
        {"stream_options": None, "temperature": None, "tools": None, "logit_bias": {}, "top_k": -1, "seed": 0},
        {"messages": [{"role": "system", "content": "x", "name": "boss"}, {**USER, "name": "Bo"}]},
        {"messages": [USER, {"role": "assistant", "content": "a", "name": "agent"}, USER]},
        {"chat_template_kwargs": {"enable_thinking": False}, "logprobs": False, "seed": -(2**63)},
        {"messages": [USER, {"role": "assistant", "content": "a", "refusal": None, "annotations": []}, USER]},
    ],
)
async def test_what_is_accepted(api: Served, fields: dict[str, Any]) -> None:
    status, body = await api.chat(**fields)
    assert status == 200, body


async def test_continuing_a_message_leaves_it_open(api: Served) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    status, _ = await api.chat(messages=messages, continue_final_message=True)
    assert status == 200
    assert api.mesh.text.tokenizer.decode(list(api.mesh.request.prompt_ids)).endswith("Once upon")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": "\xff"}',
        b'{"messages": NaN}',
        b'{"temperature": NaN, "messages": []}',
        b'{"temperature": 1e999, "messages": []}',
        b"[" * 100_000,
        b'{"messages":' + b"[" * 100_000,
        b'{"chat_template_kwargs":' + b'{"a":' * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800 and more text"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "model": "\\udc00abcdefgh"}',
        b'{"messages": [{"role": "user", "content": "x"}], "\\ud800abcdefgh": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1' + b"0" * 6000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1' + b"0" * 6000 + b'": 1}}',
    ],
)
async def test_what_is_no_request_is_a_400(api: Served, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/instance"):
        async with api.http.post(path, data=body) as reply:
            error = (await reply.json())["error"]
            assert reply.status in (400, 404), error
            assert error.keys() == {"message", "type", "param", "code"}
            assert len(error["message"]) < 500


async def test_a_body_that_is_too_large_is_a_413(api: Served) -> None:
    async with api.http.post("/v1/chat/completions", data=io.BytesIO(b" " * (17 << 20))) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (413, "request_too_large")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "other"}))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": JSON},
        optional={"name": JSON, "tool_calls": JSON, "tool_call_id": JSON},
    ),
    max_size=3,
)


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=40), body=st.dictionaries(FIELDS, JSON, max_size=5), messages=MESSAGES | JSON)
def test_decoding_and_checking_raise_nothing_but_input_errors(raw: bytes, body: dict[str, Any], messages: Any) -> None:
    encoded = json.dumps({**body, "messages": messages}).encode()
    for kind in (ChatBody, CompletionBody, InstanceBody):
        for data in (raw, encoded):
            try:
                if kind is InstanceBody:
                    decode_body(data, kind)
                else:
                    check_body(decode_generation_body(data, kind))
            except InputError:
                pass


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(FIELDS, JSON, max_size=3), messages=MESSAGES | st.just([USER]), prompt=JSON)
def test_no_input_is_a_5xx(fuzzer: Any, body: dict[str, Any], messages: Any, prompt: Any) -> None:
    assert fuzzer("/v1/chat/completions", {**body, "messages": messages}) < 500
    assert fuzzer("/v1/completions", {**body, "prompt": prompt}) < 500
