"""Whatever the body is, the answer is an error of Anthropic's shape and never a 5xx."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exo_mesh.api.anthropic.schema import MessagesBody, decode_count_body, decode_messages_body
from exo_mesh.api.anthropic.translate import neutral_conversation, neutral_message
from exo_mesh.errors import InputError
from tests.api.anthropic.conftest import Asking

USER = '{"max_tokens": 5, "messages": [{"role": "user", "content": %s}]}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"max_tokens": 5, "messages": NaN}',
        b'{"max_tokens": 5, "messages": ' + b"[" * 100_000,
        b'{"max_tokens": 1' + b"0" * 6000 + b', "messages": []}',
        (USER % '"\\ud800"').encode(),
        (USER % '[{"type": "text", "text": "\\ud800"}]').encode(),
        (USER % '[{"type": "\\ud800"}]').encode(),
        (USER % '[{"type": "text", "text": "x", "\\ud800": 1}]').encode(),
        (USER % ('[{"type": 1' + "0" * 6000 + "}]")).encode(),
    ],
)
async def test_what_is_no_request_is_a_400(asking: Asking, body: bytes) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        async with asking.api.http.post(path, data=body) as reply:
            error = await reply.json()
            assert reply.status == 400 and error["type"] == "error", error
            assert error["error"].keys() == {"type", "message"} and len(error["error"]["message"]) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*MessagesBody.__struct_fields__, "container", "speed", "other"}))
NAMES = st.sampled_from(
    ["text", "thinking", "data", "id", "name", "input", "tool_use_id", "content", "source", "title"]
)
KINDS = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "document", "search_result", "image", "x"]
BLOCKS = st.lists(
    st.builds(
        lambda kind, fields: {**fields, "type": kind},
        st.sampled_from(KINDS) | JSON,
        st.dictionaries(NAMES, st.text(max_size=5) | JSON, max_size=4),
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": BLOCKS | JSON}),
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(body=st.dictionaries(FIELDS, JSON, max_size=4), messages=MESSAGES | JSON, tools=BLOCKS | JSON)
def test_translating_raises_nothing_but_input_errors(body: dict[str, Any], messages: Any, tools: Any) -> None:
    encoded = json.dumps({"max_tokens": 5, **body, "messages": messages, "tools": tools}).encode()
    with suppress(InputError):
        neutral_message(decode_messages_body(encoded))
    with suppress(InputError):
        neutral_conversation(decode_count_body(encoded))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(FIELDS, JSON, max_size=2), messages=MESSAGES | st.just([{"role": "user", "content": "x"}]))
def test_no_message_is_a_5xx(fuzzer: Any, body: dict[str, Any], messages: Any) -> None:
    asked = {"max_tokens": 5, **body, "messages": messages}
    assert fuzzer("/v1/messages", asked) < 500
    assert fuzzer("/v1/messages/count_tokens", asked) < 500
