"""Tool calls, thoughts and schemas in chats, whole and streamed, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.text.output.formats import format_of, tool_grammar
from exo_mesh.text.output.tools import Tool
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

MODEL = "exo-mesh-demo"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Looks at the sky",
        "parameters": {
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "type": "object",
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("tool-model"), TEMPLATE)


@pytest.fixture
async def tool_api(tool_model: Path) -> AsyncIterator[Served]:
    mesh = ScriptedMesh(tool_model, limit=4096)
    async with served(mesh, ApiOptions(keep_alive_s=0.05, access=OPEN_ADMIN)) as server:
        yield server


def prompt_of(api: Served) -> str:
    return str(api.mesh.text.tokenizer.decode(list(api.mesh.request.prompt_ids), skip_special_tokens=False))


async def test_a_call_is_taken_out_of_the_text(tool_api: Served) -> None:
    tool_api.mesh.answer = f"<think>I look.</think>\n\nOne moment.\n{CALL}"
    reply = await tool_api.openai.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOL])
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert (choice.message.model_extra or {})["reasoning_content"] == "I look."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 3}
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens


async def test_a_stream_of_a_call_says_the_same(tool_api: Served) -> None:
    tool_api.mesh.answer = f"<think>I look.</think>\n\n{CALL}\n{CALL}"
    asked: Any = {"model": MODEL, "messages": [USER], "tools": [TOOL]}
    whole = await tool_api.openai.chat.completions.create(**asked)
    async with tool_api.openai.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    told = [
        [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        for calls in (whole.choices[0].message.tool_calls or (), streamed.choices[0].message.tool_calls or ())
    ]
    assert told[0] == told[1] == [("get_weather", {"city": "Rome", "days": 3})] * 2


async def test_a_call_begins_with_its_id_and_name(tool_api: Served) -> None:
    tool_api.mesh.answer = CALL
    stream = await tool_api.openai.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOL], stream=True)
    pieces = [piece async for chunk in stream for piece in chunk.choices[0].delta.tool_calls or ()]
    first, *others = pieces
    assert (first.index, first.type, first.id is not None) == (0, "function", True)
    assert first.function is not None and (first.function.name, first.function.arguments) == ("get_weather", "")
    assert len(others) > 1 and all(piece.id is None and piece.type is None for piece in others)


async def test_a_stream_that_begins_with_a_call_has_no_text(tool_api: Served) -> None:
    for answer, content in ((CALL, None), ("Hello", ""), (f"Hello {CALL}", "")):
        tool_api.mesh.answer = answer
        stream = await tool_api.openai.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOL], stream=True)
        chunk, *_ = [chunk async for chunk in stream]
        first = chunk.choices[0].delta
        assert (first.role, first.content) == ("assistant", content)


async def test_parallel_calls_can_be_forbidden(tool_api: Served) -> None:
    tool_api.mesh.answer = CALL + CALL
    for parallel, count in ((True, 2), (False, 1)):
        _, reply = await tool_api.chat(tools=[TOOL], parallel_tool_calls=parallel)
        assert len(reply["choices"][0]["message"]["tool_calls"]) == count


async def test_text_that_looks_like_a_call_is_text_without_tools(tool_api: Served) -> None:
    tool_api.mesh.answer = CALL
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        _, reply = await tool_api.chat(**fields)
        message = reply["choices"][0]["message"]
        assert "get_weather" in message["content"] and "tool_calls" not in message
        assert reply["choices"][0]["finish_reason"] == "stop"


async def test_a_malformed_call_is_text(tool_api: Served) -> None:
    tool_api.mesh.answer = "<tool_call>\n{broken\n</tool_call>"
    status, reply = await tool_api.chat(tools=[TOOL])
    assert (status, reply["choices"][0]["finish_reason"]) == (200, "stop")
    assert "{broken" in reply["choices"][0]["message"]["content"]


async def test_the_order_of_keys_in_a_schema_does_not_change_the_prompt(tool_api: Served) -> None:
    prompts = []
    for parameters in (
        TOOL["function"]["parameters"],
        {
            "required": ["city"],
            "type": "object",
            "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
        },
    ):
        tool = {"type": "function", "function": {**TOOL["function"], "parameters": parameters}}
        await tool_api.chat(tools=[tool])
        prompts.append(prompt_of(tool_api))
    assert prompts[0] == prompts[1]
    assert '"parameters": {"type": "object", "properties": {"city"' in prompts[0]


async def test_tool_turns_reach_the_template(tool_api: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    status, _ = await tool_api.chat(messages=turns, tools=[TOOL])
    assert status == 200
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>' in prompt_of(tool_api)
    assert "<|im_start|>tool\nsunny" in prompt_of(tool_api)


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
async def test_thinking_can_be_turned_off(tool_api: Served, fields: dict[str, Any], thinks: bool) -> None:
    assert (await tool_api.chat(**fields))[0] == 200
    assert ("</think>" not in prompt_of(tool_api)) is thinks


async def test_thoughts_never_leak_into_the_answer(tool_api: Served) -> None:
    tool_api.mesh.answer = "<think>secret</think>\n\nHello"
    for stream in (False, True):
        body = {"messages": [USER], "stream": stream}
        async with tool_api.http.post("/v1/chat/completions", json=body) as reply:
            text = await reply.text()
        assert "think>" not in text
        assert "reasoning_content" in text


async def test_a_thinking_budget_goes_to_the_driver(tool_api: Served) -> None:
    await tool_api.chat(thinking_budget=5)
    budget = tool_api.mesh.request.thinking
    assert budget is not None and budget.tokens == 5
    assert tool_api.mesh.text.decode(budget.end_ids) == "</think>"
    await tool_api.chat()
    assert tool_api.mesh.request.thinking is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_object"}}, '"type": "object"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
            '"integer"',
        ),
        ({"response_format": {"type": "json_object", "schema": {"type": "integer"}}}, '"integer"'),
        ({"response_format": {"type": "json_schema", "schema": {"type": "integer"}}}, '"integer"'),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {"type": "integer"}}}}, '"integer"'),
        ({"response_format": {"type": "json_object", "schema": {}}}, '"type": "object"'),
        ({"guided_regex": "[a-c]+"}, "a-c"),
        ({"guided_choice": ["yes", "no"]}, "yes"),
        ({"grammar": {"type": "lark", "value": 'start: "hello"'}}, "hello"),
    ],
)
async def test_what_the_answer_must_look_like_goes_to_the_driver(
    tool_api: Served, fields: dict[str, Any], words: str
) -> None:
    status, reply = await tool_api.chat(**fields)
    assert status == 200, reply
    grammar = tool_api.mesh.request.grammar
    assert grammar is not None and words in grammar.text.replace('\\"', '"')


HERMES = format_of(TEMPLATE, "", ())
enforces = pytest.mark.skipif(
    tool_grammar(HERMES, [Tool("f", "", {"type": "object"})], "required", True) is None,
    reason="the formats have no grammars of calls yet",
)


@enforces
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_forced_call_is_enforced(tool_api: Served, choice: Any) -> None:
    tool_api.mesh.answer = CALL
    status, reply = await tool_api.chat(tools=[TOOL], tool_choice=choice)
    assert (status, reply["choices"][0]["finish_reason"]) == (200, "tool_calls"), reply
    grammar = tool_api.mesh.request.grammar
    assert grammar is not None and "get_weather" in grammar.text


@enforces
async def test_a_schema_and_tools_go_together(tool_api: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    status, reply = await tool_api.chat(tools=[TOOL], response_format=schema)
    assert status == 200, reply
    grammar = tool_api.mesh.request.grammar
    assert grammar is not None and "get_weather" in grammar.text and "integer" in grammar.text


async def test_a_stream_that_is_gone_on_with_inside_a_call_is_the_same_stream(tool_api: Served) -> None:
    """The events after any id are those that the first stream had after it: ids of calls and pieces alike."""
    tool_api.mesh.answer = f"<think>I look.</think>\n\n{CALL}"
    whole = await _events(tool_api, {})
    ids = [number for number, _ in whole if number is not None]
    assert ids == sorted(ids) and len(ids) > 10
    for last in ids[:: len(ids) // 5]:
        after = [event for place, event in enumerate(whole) if place > [number for number, _ in whole].index(last)]
        assert await _events(tool_api, {"Last-Event-ID": str(last)}) == after


async def _events(api: Served, headers: dict[str, str]) -> list[tuple[int | None, Any]]:
    """(id, payload) of each event of one request."""
    body = {"messages": [USER], "tools": [TOOL], "stream": True}
    sent = {"Idempotency-Key": "k", **headers}
    async with api.http.post("/v1/chat/completions", json=body, headers=sent) as reply:
        frames = (await reply.text()).split("\n\n")
    found: list[tuple[int | None, Any]] = []
    for frame in frames:
        lines = dict(line.split(": ", 1) for line in frame.split("\n") if ": " in line)
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((int(lines["id"]) if "id" in lines else None, json.loads(lines["data"])))
    return found


async def test_several_answers_are_streamed_side_by_side(tool_api: Served) -> None:
    tool_api.mesh.answer = CALL
    stream = await tool_api.openai.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOL], n=3, stream=True)
    arguments, call_ids = [""] * 3, set()
    async for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                arguments[choice.index] += call.function.arguments or ""
                call_ids |= {call.id} - {None}
    assert [json.loads(text) for text in arguments] == [{"city": "Rome", "days": 3}] * 3
    assert len(call_ids) == 3, "each call has an id of its own"
    assert len({request.request_id for request in tool_api.mesh.requests}) == 3
    assert len({request.sampling.seed for request in tool_api.mesh.requests}) == 3
    assert len({request.share_id for request in tool_api.mesh.requests}) == 1


async def test_only_one_stream_can_be_gone_on_with(tool_api: Served) -> None:
    headers = {"Idempotency-Key": "k", "Last-Event-ID": "3"}
    body = {"messages": [USER], "stream": True, "n": 2}
    async with tool_api.http.post("/v1/chat/completions", json=body, headers=headers) as reply:
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "Last-Event-ID")
