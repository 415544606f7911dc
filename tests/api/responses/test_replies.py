"""Responses, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from exo_mesh.api.responses.opaque import unpacked
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from exo_mesh.errors import EngineError
from tests.api.openai.test_strict_replies import unknown_fields
from tests.api.openai.test_tools import CALL
from tests.api.responses.conftest import Asking, Json, events_of

TOOL: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "Looks at the sky",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
PATCH: Json = {"type": "custom", "name": "patch", "description": "Changes files"}
GROUP: Json = {"type": "namespace", "name": "team", "description": "Helpers", "tools": [{**TOOL, "name": "ask"}, PATCH]}
GROUP_CALL = '<tool_call>\n{"name": "team__ask", "arguments": {"city": "Rome"}}\n</tool_call>'
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+x"}}\n</tool_call>'
ARGUMENTS = {"city": "Rome", "days": 3}
THOUGHT = "<think>I look.</think>\n\n"
ANSWERS = {
    "text": "Hello, world!",
    "call": CALL,
    "two calls": CALL + CALL,
    "all": f"{THOUGHT}Well.\n{CALL}",
    "custom": f"One moment.{PATCH_CALL}",
    "namespace": GROUP_CALL,
    "nothing": "",
}
FIELDS: list[Json] = [
    {},
    {"reasoning": {"summary": "auto", "effort": "low"}},
    {"include": ["reasoning.encrypted_content"], "store": False},
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    {"max_output_tokens": 3},
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
NEWER = {"name", "prompt_cache_breakpoint"}
"""Fields of the documented API that this version of the package does not have."""


def rebuilt(events: list[Json]) -> Json:
    """The response that the events of a stream describe, checked for their order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    output: list[Json] = []
    texts: dict[int, str] = {}
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            texts[event["output_index"]] = ""
            continue
        place = event["output_index"]
        assert place == len(output) - 1
        if kind == "output_item.done":
            assert event["item"]["id"] == output[place]["id"]
            output[place] = event["item"]
            continue
        assert event["item_id"] == output[place]["id"]
        if kind.endswith(".delta"):
            texts[place] += event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == texts[place]
        elif kind.endswith("part.added"):
            assert event["part"]["text"] == ""
        elif kind.endswith("part.done"):
            assert event["part"]["text"] == texts[place]
        else:
            assert texts[place] == event.get("arguments", event.get("input"))
    last: Json = events[-1]["response"]
    assert last["output"] == output
    assert events[-1]["type"] == f"response.{last['status']}"
    return last


def without_ids(response: Json) -> Json:
    """The response with "" for what each request has of its own."""
    text = json.dumps({**response, "id": "", "output": [{**item, "id": ""} for item in response["output"]]})
    made: Json = json.loads(text)
    for item in made["output"]:
        if "call_id" in item:
            item["call_id"] = ""
    return made


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("fields", FIELDS, ids=[" ".join(fields) or "plain" for fields in FIELDS])
async def test_a_stream_says_what_the_whole_response_says_in_the_types_of_the_package(
    asking: Asking, answer: str, fields: Json
) -> None:
    asking.mesh.answer = ANSWERS[answer]
    asked = {"tools": [TOOL, PATCH, GROUP], **fields}
    whole = await asking.response(**asked)
    events = await asking.events(**asked)
    assert without_ids(rebuilt(events)) == without_ids(whole)
    assert unknown_fields(Response.model_validate(whole, strict=True)) == {"store"}
    for event in events:
        assert unknown_fields(EVENT.validate_python(event, strict=True)) <= {"store", *NEWER}, event


async def test_reasoning_text_and_calls_are_items(asking: Asking) -> None:
    asking.mesh.answer = ANSWERS["all"]
    response = await asking.response(tools=[TOOL])
    thought, message, call = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I look."}] and thought["summary"] == []
    assert message["content"][0]["text"] == "Well."
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == ("get_weather", ARGUMENTS, "completed")
    assert response["status"] == "completed" and call["call_id"].startswith("call_")
    assert [item["id"].partition("_")[0] for item in response["output"]] == ["rs", "msg", "fc"]
    usage = response["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0 and usage["input_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_a_client_that_asks_for_a_summary_gets_the_reasoning_there(asking: Asking) -> None:
    asking.mesh.answer = f"{THOUGHT}Well."
    events = await asking.events(reasoning={"summary": "detailed"})
    thought = rebuilt(events)["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "I look."}] and "content" not in thought
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "I look." and len(deltas) > 1


async def test_opaque_reasoning_is_the_same_each_time_and_comes_back(asking: Asking) -> None:
    asking.mesh.answer = f"{THOUGHT}Well."
    fields: Json = {"include": ["reasoning.encrypted_content"], "store": False}
    first, second = [(await asking.response(**fields))["output"] for _ in range(2)]
    assert first[0]["encrypted_content"] == second[0]["encrypted_content"]
    assert unpacked(first[0]["encrypted_content"]) == "I look."


async def test_a_custom_tool_gets_its_text(asking: Asking) -> None:
    asking.mesh.answer = ANSWERS["custom"]
    events = await asking.events(tools=[PATCH])
    message, call = rebuilt(events)["output"]
    assert message["content"][0]["text"] == "One moment."
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "*** Begin\n+x")


async def test_tools_of_a_namespace_have_it_in_their_calls(asking: Asking) -> None:
    asking.mesh.answer = GROUP_CALL
    first = await asking.response(tools=[GROUP], tool_choice={"type": "function", "name": "ask", "namespace": "team"})
    (call,) = first["output"]
    assert (call["name"], call["namespace"]) == ("ask", "team")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    await asking.response(tools=[GROUP], input=[{"role": "user", "content": "Hi"}, call, output])
    assert asking.prompt().count('"name": "team__ask"') == 2 and '"team__patch"' in asking.prompt()


async def test_the_token_limit_makes_a_response_incomplete(asking: Asking) -> None:
    response = await asking.response(max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("fields", [{"max_output_tokens": 58}, {"stop": ["Rome"]}])
async def test_a_call_that_the_end_cuts_is_incomplete(asking: Asking, fields: Json) -> None:
    """Agents run the calls of completed items."""
    asking.mesh.answer = CALL
    whole = await asking.response(tools=[TOOL])
    assert whole["output"][-1]["status"] == "completed"
    cut = await asking.response(tools=[TOOL], **fields)
    (call,) = cut["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    assert whole["output"][-1]["arguments"].startswith(call["arguments"]) and call["arguments"]
    events = await asking.events(tools=[TOOL], **fields)
    assert [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"] == [
        "incomplete"
    ]
    stored = await asking.call("GET", f"/v1/responses/{cut['id']}")
    assert stored[1]["output"] == cut["output"]


async def test_tokens_of_the_text_have_log_probabilities(asking: Asking) -> None:
    events = await asking.events(top_logprobs=2, include=["message.output_text.logprobs"])
    (part,) = rebuilt(events)["output"][0]["content"]
    assert part["text"] == "".join(one["token"] for one in part["logprobs"]) == "Hello, world!"
    assert all(one["logprob"] == -0.5 and len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one["token"] for event in deltas for one in event["logprobs"]] == [o["token"] for o in part["logprobs"]]
    plain = (await asking.response())["output"][0]["content"][0]
    assert plain["logprobs"] == []


async def test_the_fields_of_the_request_are_repeated(asking: Asking) -> None:
    asked: Json = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 50,
        "parallel_tool_calls": False,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "flex",
        "user": "u",
        "tools": [{**TOOL, "strict": True}],
    }
    response = await asking.response(**asked)
    assert {name: response[name] for name in asked} == asked
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert response["store"] is True and response["tool_choice"] == "auto"


async def test_a_stream_that_waits_has_comments_and_a_failed_one_says_why(asking: Asking) -> None:
    async def fails(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("prefill", 40, 100)
        await asyncio.sleep(0.2)
        yield asking.mesh.events(asking.mesh.text.encode_text("Hello"), request)[0]
        raise EngineError("the engine broke")

    asking.mesh.script = fails
    async with asking.api.http.post("/v1/responses", json={"input": "Hi", "stream": True}) as reply:
        text = await reply.text()
    assert text.startswith("event: response.created") and "\n: prefill 40 %" in text
    *_, error, failed = events = events_of(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (error["type"], error["code"], error["message"]) == ("error", "engine_error", "the engine broke")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine broke"}
    for event in (error, failed):
        assert unknown_fields(EVENT.validate_python(event, strict=True)) <= {"store"}
    status, _ = await asking.call("GET", f"/v1/responses/{failed['response']['id']}")
    assert status == 404


async def test_tokens_of_the_input_are_counted_as_the_request_counts_them(asking: Asking) -> None:
    asked: Json = {"instructions": "Be brief.", "tools": [TOOL], "input": [{"role": "user", "content": "Hi"}]}
    response = await asking.response(**asked)
    requests = len(asking.mesh.requests)
    status, counted = await asking.call("POST", "/v1/responses/input_tokens", {**asked, "temperature": 1})
    assert (status, counted) == (
        200,
        {"input_tokens": response["usage"]["input_tokens"], "object": "response.input_tokens"},
    )
    assert len(asking.mesh.requests) == requests
