"""Ollama's /api/chat and /api/generate: answers whole and in lines, thoughts, calls, forms, options, loading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Any

import pytest

from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from exo_mesh.errors import EngineError, OverloadError
from tests.api.ollama.conftest import MODEL, USER, asked, lines, refusal, whole
from tests.api.openai.test_tools import CALL, TOOL, prompt_of
from tests.api.scripted_mesh import Served

LAST = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}
CALLED = {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}


async def test_a_whole_chat_has_the_fields_of_ollama(api: Served) -> None:
    reply = await whole(api, "/api/chat", messages=[USER])
    assert set(reply) == {"model", "created_at", "message", "done", "done_reason", *LAST}
    assert reply["message"] == {"role": "assistant", "content": "Hello, world!"}
    assert (reply["model"], reply["done"], reply["done_reason"]) == (MODEL, True, "stop")
    assert datetime.fromisoformat(reply["created_at"]).year == 2023
    assert reply["prompt_eval_count"] == len(api.mesh.request.prompt_ids)
    assert reply["eval_count"] == len(api.mesh.text.encode_text("Hello, world!"))
    assert all(isinstance(reply[name], int) and reply[name] >= 0 for name in LAST)
    parts = reply["load_duration"] + reply["prompt_eval_duration"] + reply["eval_duration"]
    assert parts <= reply["total_duration"] + 3


async def test_a_stream_is_the_default_and_says_the_same(api: Served) -> None:
    chunks = await lines(api, "/api/chat", messages=[USER])
    assert [chunk["done"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "".join(chunk["message"]["content"] for chunk in chunks) == "Hello, world!"
    assert all(chunk["message"]["role"] == "assistant" and chunk["model"] == MODEL for chunk in chunks)
    assert not any(LAST & set(chunk) for chunk in chunks[:-1])
    assert set(chunks[-1]) >= LAST and chunks[-1]["message"]["content"] == ""
    assert chunks[-1]["done_reason"] == "stop"


async def test_generate_answers_a_prompt_whole_and_in_lines(api: Served) -> None:
    reply = await whole(api, "/api/generate", prompt="Hi", system="Be short.")
    assert set(reply) == {"model", "created_at", "response", "done", "done_reason", *LAST}
    assert reply["response"] == "Hello, world!"
    prompt = prompt_of(api)
    assert "system\nBe short." in prompt and "user\nHi" in prompt and prompt.endswith("assistant\n")
    chunks = await lines(api, "/api/generate", prompt="Hi")
    assert "".join(chunk["response"] for chunk in chunks) == "Hello, world!"
    assert chunks[-1]["done"] and chunks[-1]["done_reason"] == "stop"


async def test_a_raw_prompt_gets_no_template(api: Served) -> None:
    await whole(api, "/api/generate", prompt="Once upon", raw=True)
    assert prompt_of(api) == "Once upon"
    assert "system" in await refusal(api, "/api/generate", prompt="Hi", raw=True, system="Be short.")
    for think in (True, "low"):
        assert "think is not used with raw" in await refusal(api, "/api/generate", prompt="Hi", raw=True, think=think)
    await whole(api, "/api/generate", prompt="Once upon", raw=True, think=False)


@pytest.mark.parametrize("path", ["/api/chat", "/ollama/api/chat"])
async def test_both_paths_answer_alike(api: Served, path: str) -> None:
    assert (await whole(api, path, messages=[USER]))["message"]["content"] == "Hello, world!"


async def test_name_is_another_name_of_model(api: Served) -> None:
    async with api.http.post("/api/chat", json={"name": MODEL, "messages": [USER], "stream": False}) as reply:
        assert (await reply.json())["model"] == MODEL
    assert "send only one" in await refusal(api, "/api/chat", name="other", messages=[USER])


async def test_an_unknown_model_is_a_404_with_one_sentence(api: Served) -> None:
    status, reply = await asked(api, "/api/chat", model="nope", messages=[USER])
    assert status == 404 and reply == {"error": "no peer has nope"}


async def test_thoughts_and_calls_are_taken_out_of_the_text(able: Served) -> None:
    able.mesh.answer = f"<think>I look.</think>\n\nOne moment.\n{CALL}"
    reply = await whole(able, "/api/chat", messages=[USER], tools=[TOOL])
    message = reply["message"]
    assert (message["content"], message["thinking"]) == ("One moment.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [CALLED]
    assert reply["done_reason"] == "stop"


async def test_a_stream_sends_each_call_whole_and_thoughts_first(able: Served) -> None:
    able.mesh.answer = f"<think>I look.</think>\n\n{CALL}\n{CALL}"
    chunks = await lines(able, "/api/chat", messages=[USER], tools=[TOOL])
    messages = [chunk["message"] for chunk in chunks]
    assert "".join(message.get("thinking", "") for message in messages) == "I look."
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert [call["function"] for call in calls] == [CALLED, CALLED]
    assert "tool_calls" not in messages[-1]


async def test_a_call_that_the_token_limit_cuts_keeps_what_was_written(able: Served) -> None:
    able.mesh.answer = CALL
    reply = await whole(able, "/api/chat", messages=[USER], tools=[TOOL], options={"num_predict": 30})
    assert reply["done_reason"] == "length"
    for call in reply["message"].get("tool_calls", []):
        assert isinstance(call["function"]["arguments"], dict)


async def test_generate_has_thoughts_beside_the_response(able: Served) -> None:
    able.mesh.answer = "<think>I count.</think>\n\n42"
    reply = await whole(able, "/api/generate", prompt="Hi")
    assert (reply["thinking"], reply["response"]) == ("I count.", "42")


async def test_think_reaches_the_template(able: Served) -> None:
    able.mesh.answer = "Yes"
    await whole(able, "/api/chat", messages=[USER], think=False)
    assert prompt_of(able).endswith("</think>\n\n")
    await whole(able, "/api/chat", messages=[USER], think=True)
    assert "<think>" not in prompt_of(able)
    await whole(able, "/api/chat", messages=[USER], think="low")
    assert "<think>" not in prompt_of(able)


async def test_calls_and_their_results_reach_the_template(able: Served) -> None:
    history = [
        USER,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [{"function": CALLED}]},
        {"role": "tool", "content": "18 degrees", "tool_name": "get_weather"},
    ]
    await whole(able, "/api/chat", messages=history, tools=[TOOL])
    prompt = prompt_of(able)
    assert json.dumps(CALLED["arguments"]) in prompt and "18 degrees" in prompt


async def test_an_answer_that_has_begun_is_continued(api: Served) -> None:
    await whole(api, "/api/chat", messages=[USER, {"role": "assistant", "content": "Once upon"}])
    assert prompt_of(api).endswith("Once upon")


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [("json", '{"type": "object"}'), ({"type": "integer"}, '{"type": "integer"}')],
)
async def test_a_format_becomes_a_grammar(api: Served, wanted: Any, kind: str) -> None:
    await whole(api, "/api/chat", messages=[USER], format=wanted)
    assert api.mesh.request.grammar is not None
    assert (api.mesh.request.grammar.kind, api.mesh.request.grammar.text) == ("json_schema", kind)


async def test_no_format_and_an_unknown_one(api: Served) -> None:
    await whole(api, "/api/chat", messages=[USER], format="")
    assert api.mesh.request.grammar is None
    assert "format" in await refusal(api, "/api/chat", messages=[USER], format="xml")


async def test_options_reach_the_sampler(api: Served) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.1,
        "seed": 5,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "num_predict": 4,
        "num_ctx": 256,
        "num_gpu": 99,
        "num_thread": 4,
        "use_mmap": True,
        "mirostat": 0,
    }
    reply = await whole(api, "/api/chat", messages=[USER], options=options)
    sampling = api.mesh.request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.8, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.25, 0.75)
    assert sampling.seed == 5 and api.mesh.request.max_tokens == 4
    assert reply["done_reason"] == "length" and reply["eval_count"] == 4


@pytest.mark.parametrize("stop", ["wor", ["wor", "zzz"]])
async def test_a_stop_string_ends_the_answer(api: Served, stop: Any) -> None:
    reply = await whole(api, "/api/chat", messages=[USER], options={"stop": stop})
    assert (reply["message"]["content"], reply["done_reason"]) == ("Hello, ", "stop")


@pytest.mark.parametrize(("predict", "expected"), [(None, 100), (-1, None), (-2, None), (0, None), (9, 9)])
async def test_num_predict_limits_the_answer(able: Served, predict: int | None, expected: int | None) -> None:
    for path, fields in (("/api/chat", {"messages": [USER]}), ("/api/generate", {"prompt": "Hi", "raw": True})):
        await whole(able, path, options={"num_predict": predict}, **fields)
        room = 4096 - len(able.mesh.request.prompt_ids)
        limit = room if expected is None else 4096 if predict is None else expected
        assert able.mesh.request.max_tokens == min(room, limit)


async def test_a_repetition_penalty_looks_back_as_far_as_the_client_says(api: Served) -> None:
    for last, window in ((64, 64), (-1, 0)):
        await whole(api, "/api/chat", messages=[USER], options={"repeat_last_n": last, "repeat_penalty": 1.1})
        sampling = api.mesh.request.sampling
        assert (sampling.repetition_penalty, sampling.repetition_window) == (1.1, window)
    await whole(api, "/api/chat", messages=[USER], options={"repeat_last_n": 64, "repeat_penalty": 1})
    assert api.mesh.request.sampling.repetition_window == 0
    await api.chat(repeat_last_n=32, repeat_penalty=1.2)
    assert api.mesh.request.sampling.repetition_window == 32


async def test_a_context_above_that_of_the_model_is_what_the_model_has(api: Served) -> None:
    for wanted in (0, 4096.0, 10**6):
        await whole(api, "/api/chat", messages=[USER], options={"num_ctx": wanted})


async def test_each_line_of_a_stream_has_its_own_time(api: Served) -> None:
    times = [chunk["created_at"] for chunk in await lines(api, "/api/chat", messages=[USER])]
    assert times == sorted(times) and len(set(times)) > 1


async def test_no_repetition_is_looked_at_with_repeat_last_n_of_0(api: Served) -> None:
    await whole(api, "/api/chat", messages=[USER], options={"repeat_last_n": 0, "repeat_penalty": 1.3})
    assert api.mesh.request.sampling.repetition_penalty == 1.0


async def test_a_seed_of_minus_1_is_a_random_one(api: Served) -> None:
    await whole(api, "/api/chat", messages=[USER], options={"seed": -1})
    assert api.mesh.request.sampling.seed != 2**64 - 1


async def test_log_probabilities_come_with_each_token(api: Served) -> None:
    reply = await whole(api, "/api/chat", messages=[USER], logprobs=True, top_logprobs=2)
    assert "".join(token["token"] for token in reply["logprobs"]) == "Hello, world!"
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] == -0.5 for token in reply["logprobs"])
    assert bytes(one for token in reply["logprobs"] for one in token["bytes"]).decode() == "Hello, world!"
    assert all(isinstance(top["bytes"], list) for token in reply["logprobs"] for top in token["top_logprobs"])
    chunks = await lines(api, "/api/generate", prompt="Hi", logprobs=True)
    assert "".join(token["token"] for chunk in chunks for token in chunk.get("logprobs", [])) == "Hello, world!"
    assert "logprobs" in await refusal(api, "/api/chat", messages=[USER], top_logprobs=2)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(300, 300.0), ("5m", 300.0), ("24h", 86400.0), (-1, -1.0), ("-1", -1.0), (0, 0.0), ("", None)],
)
async def test_keep_alive_goes_with_the_request(api: Served, given: Any, seconds: float | None) -> None:
    await whole(api, "/api/chat", messages=[USER], keep_alive=given)
    assert api.mesh.request.keep_alive_s == seconds


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"num_ctx": -1}}, "options.num_ctx"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"options": {"stop": ["x" * 2000]}}, "options.stop"),
        ({"options": {"speed": 1}}, "options.speed"),
        ({"options": 3}, "options"),
        ({"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{**USER, "tool_name": "x"}]}, "messages[0].tool_name"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "x"}}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"think": "hard"}, "think"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_a_refusal_names_the_field(api: Served, fields: dict[str, Any], named: str) -> None:
    assert named in await refusal(api, "/api/chat", **{"messages": [USER], **fields})


@pytest.mark.parametrize("field", [{"suffix": "."}, {"context": [1, 2]}, {"images": ["aGk="]}, {"template": "x"}])
async def test_generate_refuses_what_it_cannot_do(api: Served, field: dict[str, Any]) -> None:
    assert next(iter(field)) in await refusal(api, "/api/generate", prompt="Hi", **field)
    neutral = {"suffix": "", "context": [], "images": [], "template": ""}
    assert (await whole(api, "/api/generate", prompt="Hi", **neutral))["done"]


@pytest.mark.parametrize(("path", "empty"), [("/api/chat", {}), ("/api/generate", {"prompt": ""})])
async def test_an_empty_request_loads_the_model(api: Served, path: str, empty: dict[str, Any]) -> None:
    status, reply = await asked(api, path, keep_alive="10m", **empty)
    assert status == 200 and (reply["done"], reply["done_reason"]) == (True, "load")
    assert [spec.model for spec in api.mesh.specs] == [MODEL] and not api.mesh.requests
    assert api.mesh.kept == {"i2": 600.0}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_keep_alive_of_0_unloads_the_model(api: Served, path: str) -> None:
    api.mesh.loaded = ("i1",)
    status, reply = await asked(api, path, keep_alive=0)
    assert status == 200 and (reply["done"], reply["done_reason"]) == (True, "unload")
    assert api.mesh.kept == {"i1": 0.0} and not api.mesh.specs
    status, reply = await asked(api, path, model=api.mesh.at_hub[0], keep_alive=0)
    assert status == 404 and api.mesh.at_hub[0] not in api.mesh.names, "nothing is fetched in order to unload it"


async def test_a_stream_that_waits_sends_lines_without_text(api: Served) -> None:
    async def slow(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("queued", 1, 2)
        await go_on.wait()
        for event in api.mesh.events(api.mesh.text.encode_text("Hi"), request):
            yield event

    go_on = asyncio.Event()
    api.mesh.script = slow
    async with api.http.post("/api/chat", json={"messages": [USER]}) as reply:
        first = json.loads(await reply.content.readline())
        assert first["message"] == {"role": "assistant", "content": ""} and not first["done"]
        go_on.set()
        rest = [json.loads(line) for line in (await reply.text()).splitlines()]
    assert "".join(line["message"]["content"] for line in rest) == "Hi"


async def test_an_error_before_the_first_token_has_its_status(api: Served) -> None:
    async def full(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        raise OverloadError("the queue is full")
        yield

    api.mesh.script = full
    status, reply = await asked(api, "/api/chat", messages=[USER])
    assert status == 429 and reply == {"error": "the queue is full"}


async def test_an_error_in_a_stream_is_its_last_line(api: Served) -> None:
    async def broken(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield api.mesh.events(api.mesh.text.encode_text("Hello, world!"), request)[0]
        raise EngineError("the engine failed")

    api.mesh.script = broken
    chunks = await lines(api, "/api/chat", messages=[USER])
    assert chunks[-1] == {"error": "the engine failed"}


async def test_a_running_answer_can_be_read_by_another_reader(api: Served) -> None:
    go_on = asyncio.Event()

    async def slow(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        events = api.mesh.events(api.mesh.text.encode_text("Hello, world!"), request)
        for index, event in enumerate(events):
            if index == 2:
                await go_on.wait()
            yield event

    api.mesh.script = slow
    async with api.http.post("/api/chat", json={"messages": [USER]}) as reply:
        secret = {"x-exo-mesh-stream-secret": reply.headers["x-exo-mesh-stream-secret"]}
        async with api.http.get("/v1/streams", headers=secret) as listed:
            (stream,) = (await listed.json())["data"]
        async with api.http.get(f"/v1/streams/{stream['id']}", headers=secret) as second:
            assert second.content_type == "application/x-ndjson"
            await second.content.readline()
            go_on.set()
            rest = [json.loads(line) for line in (await second.text()).splitlines()]
        await reply.text()
    assert rest[-1]["done"] and rest[-1]["done_reason"] == "stop"
