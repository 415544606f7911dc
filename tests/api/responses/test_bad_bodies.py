"""Whatever the body is, the answer is an error that names the field, and never a 5xx."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.api.responses.schema import ResponsesBody, decode_input_tokens_body, decode_responses_body
from exo_mesh.api.responses.translate import (
    PlacedItems,
    input_items,
    neutral_conversation,
    neutral_response,
    repeated_fields,
)
from exo_mesh.errors import InputError
from tests.api.responses.conftest import Asking


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"input": NaN}',
        b'{"input": ' + b"[" * 100_000,
        b'{"input": "x", "max_output_tokens": 1' + b"0" * 6000 + b"}",
        b'{"input": "\\ud800"}',
        b'{"input": [{"role": "user", "content": "\\ud800"}]}',
        b'{"input": [{"role": "user", "content": [{"type": "\\ud800"}]}]}',
        b'{"input": [{"type": "\\ud800"}]}',
        b'{"input": [{"id": "\\ud800"}]}',
        b'{"input": [{"id": "msg_\\u00e9_1"}]}',
        b'{"input": [{"id": 1' + b"0" * 6000 + b"}]}",
        b'{"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "\\ud800": 1}]}]}',
        b'{"input": "x", "tools": [{"type": "\\ud800"}]}',
        b'{"input": "x", "tool_choice": {"type": "\\ud800"}}',
        b'{"input": "x", "include": ["\\ud800"]}',
        b'{"input": "x", "previous_response_id": "\\ud800"}',
    ],
)
async def test_what_is_no_request_for_a_response_is_a_400(asking: Asking, body: bytes) -> None:
    async with asking.api.http.post("/v1/responses", data=body) as reply:
        error = (await reply.json())["error"]
        assert reply.status == 400, error
        assert error.keys() == {"message", "type", "param", "code"} and len(error["message"]) < 700


@pytest.mark.parametrize("name", ["é", "resp_" + "x" * 100_000, "resp_", "resp__", "../x", "resp_\x00"])
async def test_ids_that_no_response_has_are_not_found(asking: Asking, name: str) -> None:
    body = json.dumps({"input": "x", "previous_response_id": name})
    async with asking.api.http.post("/v1/responses", data=body) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (404, "previous_response_id") and len(error["message"]) < 700


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*ResponsesBody.__struct_fields__, "background", "prompt", "other"} - {"input"}))
NAMES = st.sampled_from(
    ["role", "content", "text", "id", "name", "call_id", "arguments", "output", "summary", "input", "file_data", "mode"]
)
KINDS = [
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
    "item_reference", "input_text", "output_text", "input_file", "input_image", "function", "custom", "web_search", "x",
]  # fmt: skip
OBJECTS = st.recursive(
    st.dictionaries(NAMES, st.text(max_size=5) | JSON, max_size=4),
    lambda inner: st.dictionaries(NAMES, st.lists(inner, max_size=2) | inner, max_size=3),
    max_leaves=6,
)
ITEMS = st.lists(
    st.builds(lambda kind, fields: {**fields, "type": kind}, st.sampled_from(KINDS) | JSON, OBJECTS), max_size=3
)


@settings(max_examples=150, deadline=None)
@given(body=st.dictionaries(FIELDS, JSON, max_size=4), items=ITEMS | JSON, tools=ITEMS | JSON, choice=JSON | OBJECTS)
def test_translating_items_raises_nothing_but_input_errors(
    body: dict[str, Any], items: Any, tools: Any, choice: Any
) -> None:
    encoded = json.dumps({**body, "input": items, "tools": tools, "tool_choice": choice}).encode()
    with suppress(InputError):
        decoded = decode_responses_body(encoded)
        neutral_response(decoded, PlacedItems([], input_items(decoded)))
        repeated_fields(decoded, 1.0, 1.0, is_stored=True)
    with suppress(InputError):
        counted = decode_input_tokens_body(encoded)
        neutral_conversation(counted, PlacedItems([], input_items(counted)))
