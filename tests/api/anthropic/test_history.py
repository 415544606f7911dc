"""What Anthropic's clients send as conversation, and what the model sees of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from exo_mesh.api.anthropic.messages import turns_of
from exo_mesh.api.anthropic.schema import decode_count_body, decode_messages_body
from exo_mesh.api.anthropic.translate import neutral_conversation, neutral_message
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.core.request import ToolCall, Turn
from exo_mesh.api.core.served import text_inputs
from exo_mesh.errors import InputError
from tests.api.anthropic.conftest import Asking
from tests.api.anthropic.test_messages import TOOL
from tests.api.conftest import OPEN_ADMIN
from tests.api.openai.test_tools import TEMPLATE
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.text.text_models import write_text_model

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
MARK = {"type": "ephemeral", "ttl": "1h"}


def turns(*messages: dict[str, Any], **fields: Any) -> tuple[Turn, ...]:
    return turns_of(decode_count_body(msgspec.json.encode({"messages": messages, **fields})))


def said(found: tuple[Turn, ...]) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in found]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def result(call_id: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


CALLS = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "abc"},
        text("I look."),
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}, "caller": {"type": "direct"}},
        {"type": "tool_use", "id": "t2", "name": "hear", "input": {}},
    ],
}


def test_the_system_prompt_is_text_or_blocks() -> None:
    assert said(turns(USER, system="Be brief.")) == [("system", "Be brief."), ("user", "Hi")]
    assert said(turns(USER, system=[text("Be"), text("brief.")])) == [("system", "Be\nbrief."), ("user", "Hi")]
    later = turns(USER, {"role": "system", "content": [text("Now be long.")]}, USER)
    assert said(later) == [("user", "Hi"), ("system", "Now be long."), ("user", "Hi")]


def test_calls_and_their_results_become_turns() -> None:
    results = user(result("t1", "blue"), result("t2", [text("a"), text("b")], is_error=True), text("Well?"))
    _, calls, *rest = turns(USER, CALLS, results)
    assert calls.tool_calls == (ToolCall("t1", "look", {"a": 1}), ToolCall("t2", "hear", {}))
    assert (calls.text, calls.reasoning) == ("I look.", "hm")
    assert said(tuple(rest)) == [("tool", "blue"), ("tool", "Error: a\nb"), ("user", "Well?")]
    assert [(turn.tool_call_id, turn.name) for turn in rest[:2]] == [("t1", "look"), ("t2", "hear")]


def test_consecutive_messages_of_one_speaker_are_one_turn() -> None:
    found = turns(USER, USER, {"role": "assistant", "content": "a"}, CALLS, user(result("t1", "x")), USER)
    assert said(found) == [("user", "Hi\nHi"), ("assistant", "a\nI look."), ("tool", "x"), ("user", "Hi")]
    assert len(found[1].tool_calls) == 2


def test_documents_and_search_results_are_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "source": plain, "title": "Title", "context": "Context"}
    parts = {"type": "document", "source": {"type": "content", "content": [text("one"), text("two")]}}
    found = {"type": "search_result", "source": "http://a", "title": "T", "content": [text("hit")]}
    assert said(turns(user(document, parts, found))) == [("user", "Title\nContext\nbody\none\ntwo\nT\nhttp://a\nhit")]


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [text("s", cache_control=MARK)]},
        {"messages": [user(text("Hi", cache_control=MARK))]},
        {"messages": [USER, CALLS, user(result("t1", [text("x", cache_control=MARK)]))]},
        {"messages": [USER, CALLS, user(result("t1", "x", cache_control=MARK))]},
        {"tools": [{**TOOL, "cache_control": MARK}]},
        {"cache_control": MARK},
    ],
)
def test_marks_of_cache_positions_are_noted(fields: dict[str, Any]) -> None:
    conversation = neutral_conversation(decode_count_body(msgspec.json.encode({"messages": [USER], **fields})))
    assert any(turn.has_cache_marks for turn in conversation.turns)


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        ({"keep": "all"}, ["1", "2", "3"]),
        ({"keep": {"type": "all"}}, ["1", "2", "3"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [None, "2", "3"]),
        ({}, [None, None, "3"]),
    ],
)
def test_old_thinking_is_cleared_as_the_client_asks(edit: dict[str, Any], kept: list[str | None]) -> None:
    messages: list[dict[str, Any]] = []
    for number in ("1", "2", "3"):
        thought = {"type": "thinking", "thinking": number, "signature": "s"}
        messages += [USER, {"role": "assistant", "content": [thought, text("ok")]}]
    management = {"edits": [{"type": "clear_thinking_20251015", **edit}]}
    found = turns(*messages, USER, context_management=management)
    assert [turn.reasoning for turn in found if turn.role == "assistant"] == kept


def test_replies_can_be_sent_back_unchanged() -> None:
    reply = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "redacted_thinking", "data": "x"}, text("Hello", citations=None)],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    assert said(turns(USER, reply, USER)) == [("user", "Hi"), ("assistant", "Hello"), ("user", "Hi")]


def test_what_coding_agents_send_is_accepted() -> None:
    body = {
        "model": "m",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "messages": [user(text("<system-reminder>x</system-reminder>"), text("Hi", cache_control=MARK))],
        "system": [text("x-anthropic-billing-header: a"), text("You are an agent.", cache_control=MARK)],
        "tools": [{**TOOL, "eager_input_streaming": True, "strict": True, "type": "custom", "defer_loading": False}],
        "metadata": {"user_id": "u", "session": "s"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        "speed": "standard",
        "betas": ["a-2025-01-01"],
        "diagnostics": {"previous_message_id": None},
    }
    asked = neutral_message(decode_messages_body(msgspec.json.encode(body)))
    assert (asked.max_tokens, asked.sampling.temperature) == (32000, 1)
    counted = decode_count_body(msgspec.json.encode(body))
    assert turns_of(counted)[-1].text.endswith("\nHi")


TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "x"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].source.type", "images"),
    (
        {"messages": [USER, CALLS, user(result("t1", [{"type": "image"}]))]},
        "messages[2].content[0].content[0]",
        "images",
    ),
    ({"messages": [user({"type": "web_search_tool_result"})]}, "messages[0].content[0]", "web_search_tool_result"),
    ({"messages": [user({"type": ["text"]})]}, "messages[0].content[0]", "not supported"),
    ({"messages": [user(text("x", extra=1))]}, "messages[0].content[0].extra", "does not support"),
    ({"messages": [user({"type": "text", "text": 5})]}, "messages[0].content[0].text", "expected `str`"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text", "required"),
    ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra", "does not support"),
    ({"messages": [USER, CALLS]}, "messages[1]", "tool calls"),
    (
        {"messages": [user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}})]},
        "messages[0].content[0].source.type",
        '"text" or "content"',
    ),
    (
        {"messages": [user({"type": "document", "source": {"type": "text"}})]},
        "messages[0].content[0].source.data",
        "req",
    ),
    (
        {"messages": [user({"type": "document", "source": TEXT_SOURCE, "citations": {"enabled": True}})]},
        "messages[0].content[0].citations.enabled",
        "must be false",
    ),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]},
        "tools[0].type",
        "web_search_2",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "bash_20250124"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "must be false"),
    ({"tools": [{**TOOL, "allowed_callers": ["code"]}]}, "tools[0].allowed_callers", "direct"),
    ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name", "empty"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "required"),
    ({"tools": [TOOL] * 513}, "tools", "at most 512"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice", '"b"'),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "between_tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "between 1"),
    ({"max_tokens": -1}, "max_tokens", "between 0"),
    ({"max_tokens": None}, "max_tokens", "expected `int`"),
    ({"temperature": 3}, "temperature", "between 0 and 2"),
    ({"stop_sequences": ["x" * 1025]}, "stop_sequences", "1025 characters"),
    ({"mcp_servers": [{}]}, "mcp_servers", "must be []"),
    ({"container": "c"}, "container", "does not support this field"),
    ({"inference_geo": "us"}, "inference_geo", '"global"'),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0].type",
        "",
    ),
    (
        {
            "output_format": {"type": "json_schema", "schema": {}},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "output_format",
        "send only one",
    ),
    ({"n": 2}, "n", "does not support"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_what_is_not_honoured_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        neutral_message(decode_messages_body(msgspec.json.encode({"max_tokens": 9, "messages": [USER], **fields})))
    assert refused.value.param == param and words in str(refused.value), str(refused.value)


def test_examples_of_input_are_told_to_the_model() -> None:
    body = decode_count_body(
        msgspec.json.encode({"messages": [USER], "tools": [{**TOOL, "input_examples": [{"city": "Köln"}]}]})
    )
    (tool,) = neutral_conversation(body).tools
    assert tool.description == 'Looks at the sky\nExamples of input:\n{"city": "Köln"}'


@pytest.mark.parametrize(
    ("choice", "mode", "is_parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "get_weather"}, "named", True),
    ],
)
def test_the_choice_of_tools_is_translated(choice: dict[str, Any], mode: str, is_parallel: bool) -> None:
    body = decode_count_body(msgspec.json.encode({"messages": [USER], "tools": [TOOL], "tool_choice": choice}))
    conversation = neutral_conversation(body)
    assert (conversation.tool_choice.mode, conversation.parallel_tool_calls) == (mode, is_parallel)


async def test_a_round_of_tools_reaches_the_prompt(asking: Asking) -> None:
    messages = [USER, CALLS, user(result("t1", "blue"), text("Well?"))]
    await asking.message(messages=messages, tools=[TOOL], system="Be brief.")
    prompt = asking.prompt()
    assert prompt.startswith("<tools>") and "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert 'I look.<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>' in prompt
    assert "<|im_start|>tool\nblue<|im_end|>" in prompt


@pytest.mark.parametrize(("thinking", "variables"), [(None, None), ({"type": "disabled"}, {"enable_thinking": False})])
def test_a_model_server_is_told_of_thinking_only_what_the_client_says(
    thinking: dict[str, str] | None, variables: dict[str, bool] | None
) -> None:
    body = decode_messages_body(msgspec.json.encode({"max_tokens": 9, "messages": [USER], "thinking": thinking}))
    (made,) = text_inputs(neutral_message(body))
    assert msgspec.json.decode(made.body).get("chat_template_kwargs") == variables


STRICT = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "seen"),
    [
        (TEMPLATE, "user\nHi<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>"),
        (STRICT, "user\nHi\n<system>\nBe brief.\n</system><|im_end|>"),
    ],
)
async def test_a_later_system_message_reaches_models_whose_template_knows_none(
    tmp_path: Path, template: str, seen: str
) -> None:
    mesh = ScriptedMesh(write_text_model(tmp_path / "m", template), limit=4096)
    async with served(mesh, ApiOptions(access=OPEN_ADMIN)) as server:
        asking = Asking(server)
        await asking.message(messages=[USER, {"role": "system", "content": "Be brief."}], system="You are kind.")
        assert seen in asking.prompt()
