"""Messages as applications send them back: with notes of their own, thoughts, cut calls and turns without a word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exo_mesh.api.core.call_arguments import INVALID
from exo_mesh.api.core.neutral_fields import ANY
from exo_mesh.api.core.request import Turn
from exo_mesh.api.openai.lenient import IN_MESSAGES
from exo_mesh.api.openai.messages import turns_of
from exo_mesh.api.openai.schema import ChatBody, Message, decode_generation_body
from exo_mesh.api.openai.translate import thinking_of
from exo_mesh.errors import InputError
from tests.api.scripted_mesh import Served

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
NOTES: dict[str, Any] = {name: {"a": [1]} if allowed is ANY else allowed[0] for name, allowed in IN_MESSAGES.items()}


def body_with(message: dict[str, Any], **fields: Any) -> ChatBody:
    return decode_generation_body(json.dumps({"messages": [USER, message], **fields}).encode(), ChatBody)


def turn_of(message: dict[str, Any]) -> Turn:
    return turns_of(body_with(message).messages)[1]


def test_notes_of_applications_change_nothing() -> None:
    said = {"role": "assistant", "content": "Yes."}
    assert turn_of({**said, **NOTES}) == turn_of(said)
    assert turn_of({**said, **dict.fromkeys(IN_MESSAGES)}) == turn_of(said), "null does nothing"


async def test_they_are_accepted_over_http_beside_neutral_fields(api: Served) -> None:
    status, reply = await api.chat(messages=[{**USER, "id": "m-1"}, {"role": "assistant", **NOTES}, USER], ttl=300)
    assert status == 200, reply


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"images": ["…"]}, "messages[1].images"),
        ({"prefix": True}, "messages[1].prefix"),
        ({"partial": True}, "messages[1].partial"),
        ({"shout": 1}, "messages[1].shout"),
        ({"id": "m-1", "shout": 1}, "messages[1].shout"),
        ({"audio": {"id": "a"}}, "messages[1].audio"),
    ],
)
def test_what_would_change_the_prompt_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        body_with({"role": "assistant", "content": "Yes.", **fields})
    assert caught.value.param == param


def test_no_note_is_a_field_that_means_something() -> None:
    assert not IN_MESSAGES.keys() & set(Message.__struct_fields__)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_comes_back_under_any_of_its_names(name: str) -> None:
    turn = turn_of({"role": "assistant", "content": None, name: "Hm."})
    assert (turn.text, turn.reasoning) == ("", "Hm.")


def test_parts_of_an_assistant_may_be_thoughts_and_refusals() -> None:
    parts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "text", "text": "Yes", "annotations": []},
        {"type": "refusal", "refusal": "but no"},
    ]
    turn = turn_of({"role": "assistant", "content": parts})
    assert (turn.text, turn.reasoning) == ("Yes\nbut no", "Hm.")


def test_a_user_does_not_think_in_parts() -> None:
    with pytest.raises(InputError, match='parts of type "thinking" are not supported'):
        turn_of({"role": "user", "content": [{"type": "thinking", "thinking": "Hm."}]})


def test_parts_of_the_responses_api_are_text() -> None:
    assert turn_of({"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}).text == "Hi"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "tool", "tool_call_id": "c-1", "content": None}, ""),
    ],
)
def test_turns_without_a_word_are_empty(message: dict[str, Any], text: str) -> None:
    assert turn_of(message).text == text


@pytest.mark.parametrize("written", ['{"city": "Par', "city=Paris", "[1]", '"Paris"', "7", "{" * 5000])
def test_arguments_that_a_model_got_wrong_do_not_end_the_conversation(written: str) -> None:
    call = {"id": "c-1", "type": "function", "function": {"name": "get_weather", "arguments": written}}
    turn = turn_of({"role": "assistant", "content": None, "tool_calls": [call]})
    assert turn.tool_calls[0].arguments == {INVALID: written}


@pytest.mark.parametrize(("written", "read"), [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ({"a": 1}, {"a": 1})])
def test_arguments_that_are_an_object_are_read(written: Any, read: dict[str, Any]) -> None:
    call = {"id": "c-1", "type": "function", "function": {"name": "f", "arguments": written}}
    assert turn_of({"role": "assistant", "tool_calls": [call]}).tool_calls[0].arguments == read


def test_a_mark_on_a_message_is_a_mark_in_its_content() -> None:
    assert turn_of({"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}}).has_cache_marks


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({"thinking": {"type": "disabled"}}, (False, None, None)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, (True, None, 9)),
        ({"thinking": {"type": "adaptive"}}, (None, None, None)),
        ({"reasoning": {"effort": "none"}}, (None, "none", None)),
        ({"reasoning": {"enabled": False, "max_tokens": 5}}, (False, None, 5)),
        ({"think": True}, (True, None, None)),
        ({"think": "low"}, (None, "low", None)),
        ({"enable_thinking": True, "think": False}, (True, None, None)),
        ({"reasoning_effort": "high", "reasoning": {"effort": "low"}}, (None, "high", None)),
    ],
)
def test_thinking_is_asked_for_in_the_words_of_any_server(fields: dict[str, Any], wish: tuple[Any, ...]) -> None:
    thinking = thinking_of(body_with(USER, **fields))
    assert (thinking.enabled, thinking.effort, thinking.budget) == wish


async def test_openrouters_wish_for_usage_is_honoured_in_a_stream(api: Served) -> None:
    body = {"messages": [USER], "stream": True, "usage": {"include": True}}
    async with api.http.post("/v1/chat/completions", json=body) as reply:
        assert '"usage":{' in await reply.text()
