"""What clients send as items, and what the model sees of them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from exo_mesh.api.core.request import ToolCall, Turn
from exo_mesh.api.responses.ids import ItemPlace, item_id, place_of
from exo_mesh.api.responses.opaque import MAX_CHARS, PREFIX, packed, unpacked
from exo_mesh.api.responses.turns import turns_of
from exo_mesh.errors import InputError
from tests.api.responses.conftest import Asking, Json
from tests.api.responses.test_replies import PATCH, TOOL

USER: Json = {"role": "user", "content": "Hi"}


def turns(*items: Json) -> tuple[Turn, ...]:
    return turns_of((item, f"input[{index}]") for index, item in enumerate(items))


def said(found: tuple[Turn, ...]) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in found]


def call(call_id: str, name: str = "look", arguments: str = "{}", **fields: Any) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def output(call_id: str, text: Any = "blue") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def thought(**fields: Any) -> Json:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def parts(*texts: str, kind: str = "input_text") -> list[Json]:
    return [{"type": kind, "text": text} for text in texts]


def test_messages_are_text_or_parts_of_any_role() -> None:
    answer = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
    }
    found = turns({"role": "developer", "content": parts("a", "b")}, USER, answer, USER)
    assert said(found) == [("developer", "a\nb"), ("user", "Hi"), ("assistant", "Well."), ("user", "Hi")]


def test_what_the_assistant_did_in_a_row_is_one_turn() -> None:
    said_so = {"role": "assistant", "content": "I look."}
    items = (USER, thought(content=parts("hm", kind="reasoning_text")), said_so, call("c1"), call("c2", "hear"))
    _, turn, first, second = turns(*items, output("c1"), output("c2", parts("a", "b")))
    assert (turn.text, turn.reasoning) == ("I look.", "hm")
    assert turn.tool_calls == (ToolCall("c1", "look", {}), ToolCall("c2", "hear", {}))
    assert (first.role, first.text, first.name, first.tool_call_id) == ("tool", "blue", "look", "c1")
    assert (second.text, second.name) == ("a\nb", "hear")


def test_calls_after_a_result_are_a_turn_of_their_own() -> None:
    found = turns(USER, call("c1"), output("c1"), call("c2", arguments="[1"), output("c2"))
    assert [turn.role for turn in found] == ["user", "assistant", "tool", "assistant", "tool"]
    assert found[3].tool_calls[0].arguments == {"invalid_arguments": "[1"}


def test_custom_calls_are_functions_with_one_text() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+x"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    _, turn, tool = turns(USER, custom, result)
    assert turn.tool_calls == (ToolCall("c1", "patch", {"input": "+x"}),)
    assert (tool.text, tool.name) == ("done", "patch")


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"content": parts("a", "b", kind="reasoning_text"), "summary": parts("s", kind="summary_text")}, "a\nb"),
        ({"content": None, "encrypted_content": packed("deep")}, "deep"),
        ({"encrypted_content": "gAAAAA==", "summary": parts("s", kind="summary_text")}, "s"),
        ({"encrypted_content": PREFIX + "!!"}, None),
        ({}, None),
    ],
)
def test_reasoning_is_read_from_what_there_is(fields: Json, read: str | None) -> None:
    _, turn = turns(USER, thought(**fields), {"role": "assistant", "content": "ok"})
    assert turn.reasoning == read


def test_reasoning_without_an_answer_stays_a_turn() -> None:
    found = turns(USER, thought(content=parts("hm", kind="reasoning_text")), USER)
    assert said(found) == [("user", "Hi"), ("assistant", ""), ("user", "Hi")] and found[1].reasoning == "hm"


def test_opaque_reasoning_never_grows_without_bound() -> None:
    assert len(unpacked(packed("a" * (MAX_CHARS + 10)))) == MAX_CHARS
    assert unpacked(PREFIX + base64.b64encode(b"no zlib").decode()) == ""


def test_a_file_of_text_is_read() -> None:
    data = base64.b64encode("Grüße".encode()).decode()
    for given in (data, f"data:text/plain;base64,{data}"):
        file = {"type": "input_file", "filename": "a.txt", "file_data": given}
        assert turns({"role": "user", "content": [file]})[0].text == "a.txt\nGrüße"


@pytest.mark.parametrize(
    ("item", "where", "words"),
    [
        ({"type": "web_search_call", "id": "ws_1"}, "input[0]", "web_search_call"),
        ({"type": 1, **USER}, "input[0].type", "expected"),
        ({**USER, "colour": 1}, "input[0].colour", "does not support"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content[0].image_url",
            "data",
        ),
        ({"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0]", "user"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[0].content[0]", "input_audio"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0].file_id", "text"),
        (
            {"role": "user", "content": [{"type": "input_file", "file_data": "JVBERi0xLjcNCiW1tbW1"}]},
            "input[0].content[0].file_data",
            "text",
        ),
        ({"role": "user", "content": [{"type": "input_text", "text": 1}]}, "input[0].content[0]", "string"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id", "required"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output", "required"),
    ],
)
def test_what_no_model_gets_is_refused_by_its_place(item: Json, where: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        turns(item)
    assert caught.value.param == where


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [TOOL, {**TOOL, "name": ""}]}, "tools[1].name"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "some"}, "truncation"),
        ({"include": ["everything"]}, "include"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"colour": 1}, "colour"),
        ({"input": [{"type": "item_reference", "id": "msg_nobody"}]}, "input[0]"),
    ],
)
async def test_a_field_that_would_change_the_answer_is_refused_by_its_name(
    asking: Asking, fields: Json, param: str
) -> None:
    status, found, message = await asking.refusal(**fields)
    assert (status, found) == (400, param), message


async def test_fields_that_change_nothing_are_accepted(asking: Asking) -> None:
    await asking.response(
        background=False,
        conversation=None,
        prompt=None,
        truncation="disabled",
        max_tool_calls=3,
        text={"verbosity": "low"},
        include=["web_search_call.action.sources"],
        prompt_cache_retention="24h",
        context_management=[],
        stream_options={"include_obfuscation": False},
    )


async def test_only_allowed_tools_are_offered(asking: Asking) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}
    await asking.response(tools=[TOOL, PATCH], tool_choice=allowed)
    assert '"patch"' in asking.prompt() and "get_weather" not in asking.prompt()
    await asking.response(tools=[TOOL, PATCH], tool_choice="none")
    assert "patch" not in asking.prompt()


async def test_required_calls_and_schemas_are_enforced(asking: Asking) -> None:
    await asking.response(tools=[TOOL], tool_choice="required")
    assert asking.mesh.request.grammar is not None
    await asking.response(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}})
    assert asking.mesh.request.grammar is not None
    await asking.response(text={"format": {"type": "json_object"}})
    assert asking.mesh.request.grammar is not None
    await asking.response(text={"format": {"type": "text"}})
    assert asking.mesh.request.grammar is None


async def test_a_grammar_of_a_custom_tool_is_shown_to_the_model(asking: Asking) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    await asking.response(tools=[{**PATCH, "format": form}])
    assert "must match this grammar (lark)" in asking.prompt()


async def test_the_oldest_exchanges_are_dropped_only_if_the_client_asks_for_it(asking: Asking) -> None:
    asking.mesh.limit = 400
    items: list[Json] = []
    for number in range(30):
        items += [{"role": "user", "content": f"question {number}"}, call(f"c{number}"), output(f"c{number}", "blue")]
    asked: Json = {"instructions": "Be brief.", "input": [*items, USER], "max_output_tokens": 50}
    status, param, message = await asking.refusal(**asked)
    assert (status, param) == (400, "input") and "tokens" in message
    response = await asking.response(**asked, truncation="auto")
    assert response["truncation"] == "auto"
    assert asking.mesh.request.max_tokens == 50 and len(asking.mesh.request.prompt_ids) <= 350
    prompt = asking.prompt()
    assert "Be brief." in prompt and "question 29" in prompt and "question 0" not in prompt
    kept = [number for number in range(30) if f"question {number}<" in prompt]
    assert kept == list(range(kept[0], 30)) and prompt.count("<|im_start|>tool") == len(kept) > 2
    longer = len(asking.mesh.request.prompt_ids) / (len(kept) + 2)
    assert len(asking.mesh.request.prompt_ids) + longer > 300, "no more was dropped than had to be"
    assert (await asking.refusal(input="word " * 500, truncation="auto"))[0] == 400


def test_the_id_of_an_item_names_its_place() -> None:
    name = item_id("msg", "resp_abcd1234_0123_9f", 12)
    assert name == "msg_abcd1234_0123_9f_12"
    assert place_of(name) == ItemPlace("resp_abcd1234_0123_9f", 12, is_input=False)
    assert place_of("msg_12") is None and place_of("resp_a_1") is None
