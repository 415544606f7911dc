"""Messages of Anthropic's dialect, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from exo_mesh.errors import EngineError
from tests.api.anthropic.conftest import Asking, Event, events_of
from tests.api.openai.test_tools import CALL

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Looks at the sky",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
ARGUMENTS = {"city": "Rome", "days": 3}
THOUGHT = "<think>I look.</think>\n\n"


def block_types(reply: dict[str, Any]) -> list[str]:
    return [block["type"] for block in reply["content"]]


def replayed(events: list[Event]) -> dict[str, Any]:
    """The message that a stream describes, as Anthropic's clients put it together."""
    (name, start), *rest = events
    assert name == "message_start" and events[-1] == ("message_stop", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    arguments: dict[int, str] = {}
    open_block: int | None = None
    for name, event in rest[:-1]:
        assert event["type"] == name
        match name:
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                delta = dict(event["delta"])
                del delta["type"]
                ((field, text),) = delta.items()
                if field == "partial_json":
                    arguments[event["index"]] = arguments.get(event["index"], "") + text
                else:
                    message["content"][open_block][field] += text
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case _:
                raise AssertionError(name)
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return message


async def test_a_message_is_answered_with_text_and_usage(asking: Asking) -> None:
    reply = await asking.message(model="exo-mesh-demo")
    num_prompt = len(asking.mesh.request.prompt_ids)
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "exo-mesh-demo",
        "content": [{"type": "text", "text": "Hello, world!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(asking.mesh.text.encode_text("Hello, world!")),
            "output_tokens_details": None,
            "service_tier": "standard",
        },
    }


async def test_cached_tokens_are_counted_apart_from_the_other_input(asking: Asking) -> None:
    asking.mesh.cached = 5
    usage = (await asking.message())["usage"]
    assert usage["cache_read_input_tokens"] == 5
    assert usage["input_tokens"] == len(asking.mesh.request.prompt_ids) - 5
    last = [data for name, data in await asking.events() if name == "message_delta"][-1]
    assert last["usage"]["cache_read_input_tokens"] == 5


@pytest.mark.parametrize(
    ("answer", "fields", "types", "stop"),
    [
        ("Hello, world!", {}, ["text"], "end_turn"),
        ("Hello, world!", {"max_tokens": 2}, ["text"], "max_tokens"),
        ("Hello, world!", {"stop_sequences": ["xyz", ", w"]}, ["text"], "stop_sequence"),
        (THOUGHT + "Well.", {}, ["thinking", "text"], "end_turn"),
        (CALL + CALL, {"tools": [TOOL]}, ["tool_use", "tool_use"], "tool_use"),
        (f"{THOUGHT}Look.\n{CALL}", {"tools": [TOOL]}, ["thinking", "text", "tool_use"], "tool_use"),
        ("", {}, [], "end_turn"),
    ],
)
async def test_a_stream_says_what_the_whole_reply_says(
    asking: Asking, answer: str, fields: dict[str, Any], types: list[str], stop: str
) -> None:
    asking.mesh.answer = answer
    whole, streamed = await asking.message(**fields), replayed(await asking.events(**fields))
    assert whole.pop("id") != streamed.pop("id")
    assert (block_types(whole), whole["stop_reason"]) == (types, stop)
    for reply in (whole, streamed):
        for block in reply["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_") and block["input"] == ARGUMENTS
    assert streamed == whole


async def test_the_stop_sequence_that_matched_is_named(asking: Asking) -> None:
    reply = await asking.message(stop_sequences=["xyz", ", w"])
    assert reply["content"] == [{"type": "text", "text": "Hello"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", ", w")


async def test_thinking_has_a_signature_and_is_counted(asking: Asking) -> None:
    asking.mesh.answer = THOUGHT + "Well."
    reply = await asking.message(thinking={"type": "enabled", "budget_tokens": 100})
    assert reply["content"] == [
        {"type": "thinking", "thinking": "I look.", "signature": "exo-mesh"},
        {"type": "text", "text": "Well."},
    ]
    assert 0 < reply["usage"]["output_tokens_details"]["thinking_tokens"] < reply["usage"]["output_tokens"]
    budget = asking.mesh.request.thinking
    assert budget is not None and budget.tokens == 100


async def test_omitted_thinking_leaves_empty_blocks(asking: Asking) -> None:
    asking.mesh.answer = THOUGHT + "Well."
    thinking = {"type": "adaptive", "display": "omitted"}
    whole, streamed = await asking.message(thinking=thinking), replayed(await asking.events(thinking=thinking))
    for reply in (whole, streamed):
        assert reply["content"][0] == {"type": "thinking", "thinking": "", "signature": "exo-mesh"}


@pytest.mark.parametrize(
    ("thinking", "is_off"), [(None, True), ({"type": "disabled"}, True), ({"type": "adaptive"}, False)]
)
async def test_a_model_thinks_only_if_the_client_wants_it(
    asking: Asking, thinking: dict[str, str] | None, is_off: bool
) -> None:
    await asking.message(thinking=thinking)
    assert ("<think>\n\n</think>" in asking.prompt()) == is_off


async def test_arguments_that_the_token_limit_cut_are_kept(asking: Asking) -> None:
    asking.mesh.answer = CALL
    num_tokens = len(asking.mesh.text.encode_text(CALL[: CALL.index("Rome")]))
    reply = await asking.message(tools=[TOOL], max_tokens=num_tokens)
    assert reply["stop_reason"] == "max_tokens"
    assert reply["content"][0]["input"]["invalid_arguments"].startswith('{"city"')


async def test_the_last_message_of_the_assistant_is_continued(asking: Asking) -> None:
    asking.mesh.answer = " is blue."
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The sky"}]
    reply = await asking.message(messages=messages)
    assert asking.prompt().endswith("<|im_start|>assistant\nThe sky")
    assert reply["content"] == [{"type": "text", "text": " is blue."}]


async def test_a_schema_is_enforced_by_either_name(asking: Asking) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        await asking.message(**fields)
        grammar = asking.mesh.request.grammar
        assert grammar is not None and '"integer"' in grammar.text


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", "2031-01-01"])
async def test_sampling_fields_reach_the_ring_in_every_version(asking: Asking, version: str) -> None:
    """Anthropic refuses them since 2026-10-21; people who run a model at home want them."""
    fields = asking.body(temperature=0.5, top_k=7, top_p=0.9)
    status, body = await asking.post("/v1/messages", fields, anthropic_version=version)
    assert (status, body.get("type")) == (200, "message"), body
    sampling = asking.mesh.request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)


async def test_only_the_prompt_is_read_if_no_token_is_wanted(asking: Asking) -> None:
    reply = await asking.message(max_tokens=0)
    assert (reply["content"], reply["stop_reason"]) == ([], "max_tokens")
    assert reply["usage"]["output_tokens"] == 0 < reply["usage"]["input_tokens"]


async def test_a_waiting_stream_begins_with_the_message_and_sends_pings(asking: Asking) -> None:
    pinged = asyncio.Event()

    async def slow(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("prefill", 40, 100)
        await pinged.wait()
        async for event in asking.mesh.echo(request):
            yield event

    asking.mesh.script = slow
    async with asking.api.http.post("/v1/messages", json=asking.body(stream=True)) as reply:
        begun = b""
        while b"event: ping" not in begun:
            begun += await reply.content.readany()
        pinged.set()
        events = events_of((begun + await reply.content.read()).decode())
    assert [name for name, _ in events[:2]] == ["message_start", "ping"]
    assert events[1][1] == {"type": "ping"}
    assert replayed([event for event in events if event[0] != "ping"])["stop_reason"] == "end_turn"


async def test_an_error_in_a_stream_is_an_event(asking: Asking) -> None:
    async def failing(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield asking.mesh.events([5, 6], request)[0]
        raise EngineError("the engine broke")

    asking.mesh.script = failing
    events = await asking.events()
    assert events[-1] == (
        "error",
        {"type": "error", "error": {"type": "api_error", "message": "the engine broke"}},
    )
    assert "message_stop" not in [name for name, _ in events]


async def test_a_stream_can_be_continued_with_its_key(asking: Asking) -> None:
    asking.mesh.answer = THOUGHT + "Well then."
    headers = {"Idempotency-Key": "k1"}
    body = asking.body(stream=True)
    async with asking.api.http.post("/v1/messages", json=body, headers=headers) as reply:
        first = await reply.text()
    ids = [int(line[4:]) for line in first.splitlines() if line.startswith("id: ")]
    assert ids == sorted(set(ids)) and len(ids) > 3
    middle = ids[len(ids) // 2]
    async with asking.api.http.post(
        "/v1/messages", json=body, headers={**headers, "Last-Event-ID": str(middle)}
    ) as reply:
        rest = await reply.text()
    assert rest and first.endswith(rest) and f"id: {middle}\n" not in rest and "message_start" not in rest


async def test_a_running_answer_is_read_in_the_same_dialect(asking: Asking) -> None:
    go = asyncio.Event()

    async def gated(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("prefill", 1, 2)
        await go.wait()
        async for event in asking.mesh.echo(request):
            yield event

    asking.mesh.script = gated
    http = asking.api.http
    async with http.post("/v1/messages", json=asking.body(stream=True)) as own:
        path = f"/v1/streams/{asking.mesh.request.request_id}"
        async with http.get(path) as other:
            assert other.status == 200, await other.text()
            go.set()
            seen = [[e for e in events_of(await one.text()) if e[0] != "ping"] for one in (own, other)]
    assert seen[0] == seen[1]
