"""POST /v1/chat/completions and /v1/completions, through OpenAI's own client and byte by byte."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.api.core.preparing import choose_model
from exo_mesh.api.core.templates import TemplateRenderer
from exo_mesh.domain.request import FinishReason, GenerateRequest, Progress, TokenEvent
from exo_mesh.errors import (
    DeadlineError,
    EngineError,
    InputError,
    MemoryPressureError,
    MeshError,
    ModelError,
    OverloadError,
    PendingPlacementError,
    PlacementError,
    StageLostError,
)
from exo_mesh.models.entry import ModelEntry
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import encode_chat, write_text_model

USER: list[Any] = [{"role": "user", "content": "Hi"}]
MODEL = "exo-mesh-demo"


async def events_of(api: Served, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
    """The data events of a stream, without [DONE]."""
    async with api.http.post(path, json={"messages": USER, "stream": True, **fields}) as reply:
        assert reply.status == 200, await reply.text()
        frames = (await reply.text()).split("\n\n")
    data = [frame.removeprefix("data: ") for frame in frames if frame.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(text) for text in data]


async def test_a_whole_reply_has_what_openai_promises(api: Served) -> None:
    reply = await api.openai.chat.completions.create(model=MODEL, messages=USER)
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.created, reply.model) == ("chat.completion", 1_700_000_000, MODEL)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, world!", "stop")
    assert choice.logprobs is None
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(api.mesh.request.prompt_ids)
    assert reply.usage.completion_tokens == len(api.mesh.text.encode_text("Hello, world!"))
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_shown_and_counted_once_for_all_choices(api: Served, stream: bool) -> None:
    api.mesh.cached = 5
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "n": 2}
    if stream:
        options = {"include_usage": True}
        chunks = [
            one async for one in await api.openai.chat.completions.create(**asked, stream=True, stream_options=options)
        ]
        usage = chunks[-1].usage
    else:
        usage = (await api.openai.chat.completions.create(**asked)).usage
    assert usage.prompt_tokens_details.cached_tokens == 5
    assert usage.prompt_tokens == len(api.mesh.request.prompt_ids)


async def test_the_prompt_is_the_rendered_template(api: Served) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]},
    ]
    await api.openai.chat.completions.create(model=MODEL, messages=messages)
    assert api.mesh.text.tokenizer.decode(list(api.mesh.request.prompt_ids), skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello\nyou<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stream_says_the_same_as_a_whole_reply(api: Served) -> None:
    api.mesh.answer = "grüße 🙂 日本語!"
    stream = await api.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
    chunks = [chunk async for chunk in stream]
    assert {(c.id, c.object, c.created, c.model) for c in chunks} == {
        (chunks[0].id, "chat.completion.chunk", 1_700_000_000, MODEL)
    }
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == api.mesh.answer
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (deltas[-1].content, chunks[-1].choices[0].finish_reason) == (None, "stop")
    assert all(chunk.usage is None for chunk in chunks)


async def test_the_bytes_of_a_stream(api: Served) -> None:
    api.mesh.answer = "Hello"
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    async with api.http.post("/v1/chat/completions", json=body) as reply:
        raw = await reply.read()
        headers = reply.headers
    assert headers["Content-Type"] == "text/event-stream"
    assert (headers["Cache-Control"], headers["X-Accel-Buffering"]) == ("no-cache", "no")
    assert raw.endswith(b"data: [DONE]\n\n")
    frames = raw.split(b"\n\n")
    assert frames.pop() == b""
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    events = [json.loads(frame[6:]) for frame in frames[:-1]]
    head = {
        "id": events[0]["id"],
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": MODEL,
        "system_fingerprint": events[0]["system_fingerprint"],
    }
    rest = {"index": 0, "logprobs": None, "finish_reason": None}
    text = [event["choices"][0]["delta"]["content"] for event in events[1:-2]]
    assert "".join(text) == "Hello"
    opening = {"role": "assistant", "content": "", "refusal": None}
    assert events[0] == {**head, "choices": [{**rest, "delta": opening}], "usage": None}
    assert events[1] == {**head, "choices": [{**rest, "delta": {"content": text[0]}}], "usage": None}
    assert events[-2] == {**head, "choices": [{**rest, "delta": {}, "finish_reason": "stop"}], "usage": None}
    assert {k: v for k, v in events[-1].items() if k != "usage"} == {**head, "choices": []}
    assert events[-1]["usage"]["completion_tokens"] == len(api.mesh.text.encode_text("Hello"))


async def test_usage_can_come_with_every_chunk(api: Served) -> None:
    events = await events_of(api, stream_options={"continuous_usage_stats": True, "include_usage": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (events[-1]["choices"], counts[-1]) == ([], len(api.mesh.text.encode_text("Hello, world!")))


async def test_max_tokens_ends_with_length(api: Served) -> None:
    reply = await api.openai.chat.completions.create(model=MODEL, messages=USER, max_tokens=99, max_completion_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2
    assert api.mesh.request.max_tokens == 2


async def test_without_a_wish_all_that_is_left_of_the_context_may_be_used(api: Served) -> None:
    await api.chat()
    assert api.mesh.request.max_tokens == api.mesh.limit - len(api.mesh.request.prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [", wo", ["zzz", ", wo"]])
async def test_a_stop_string_ends_the_reply_and_the_request(api: Served, stop: Any, stream: bool) -> None:
    async def for_ever(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        for event in api.mesh.events(api.mesh.text.encode_text("Hello, world!" * 9), request):
            yield event
        await asyncio.Event().wait()

    api.mesh.script = for_ever
    if stream:
        events = await events_of(api, stop=stop)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        finish = events[-1]["choices"][0]["finish_reason"]
    else:
        _, body = await api.chat(stop=stop)
        text, finish = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
    assert (text, finish) == ("Hello", "stop")
    await api.mesh.ended.wait()
    assert api.mesh.running == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_bytes_join_to_the_text_also_inside_characters(api: Served, stream: bool) -> None:
    api.mesh.answer = "ü𝄞 x"  # 𝄞 is not in the tokenizer's corpus: a token per byte
    if stream:
        events = await events_of(api, logprobs=True, top_logprobs=2)
        content = [token for e in events for token in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
    else:
        _, body = await api.chat(logprobs=True, top_logprobs=2)
        content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == len(api.mesh.text.encode_text(api.mesh.answer))
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == api.mesh.answer
    assert {len(token["top_logprobs"]) for token in content} == {2}
    assert {token["logprob"] for token in content} == {-0.5}


async def test_logprobs_never_show_a_stop_string(api: Served) -> None:
    _, body = await api.chat(logprobs=True, stop="world")
    content = body["choices"][0]["logprobs"]["content"]
    assert body["choices"][0]["message"]["content"] == "Hello, "
    assert b"world" not in bytes(byte for token in content for byte in token["bytes"])


async def test_sampling_fields_reach_the_sampler(api: Served) -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
    await api.chat(
        **fields,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"5": -100, "3": 1.5},
        seed=-1,
        ignore_eos=True,
        min_tokens=3,
    )
    sampling = api.mesh.request.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
    assert sampling.logit_bias == ((3, 1.5), (5, -100))
    assert sampling.seed == 2**64 - 1
    assert (api.mesh.request.ignore_eos, api.mesh.request.min_tokens) == (True, 3)
    assert api.mesh.request.stop_ids == api.mesh.text.eos_ids


async def test_without_a_seed_each_request_gets_its_own(api: Served) -> None:
    await api.chat()
    await api.chat()
    assert api.mesh.requests[0].sampling.seed != api.mesh.requests[1].sampling.seed
    assert api.mesh.request.sampling.temperature == 1.0


async def test_comments_say_what_is_waited_for(api: Served) -> None:
    """The stream begins before the first token, and comments tell how far loading is."""
    go_on = asyncio.Event()

    async def slow(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("loading", 3, 8)
        await go_on.wait()
        yield Progress("prefill", 2, 5)
        yield TokenEvent(0, None, finish=FinishReason.STOP)

    api.mesh.script = slow
    async with api.http.post("/v1/chat/completions", json={"messages": USER, "stream": True}) as reply:
        assert await reply.content.readline() == b": loading 3/8\n"
        go_on.set()
        rest = (await reply.read()).decode()
    events = [json.loads(line[6:]) for line in rest.split("\n") if line.startswith("data: {")]
    assert [event["choices"][0]["delta"].get("role") for event in events] == ["assistant", None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (PlacementError("needs 9 GB, there are 3 GB"), 400, {}),
        (PendingPlacementError("not yet"), 503, {"Retry-After": "5"}),
        (MemoryPressureError("short of memory", retry_after_s=3), 503, {"Retry-After": "3"}),
        (OverloadError("the queue is full", retry_after_s=2.5), 429, {"Retry-After": "3"}),
        (StageLostError("gone"), 503, {"Retry-After": "1"}),
        (EngineError("NaN"), 500, {}),
        (ModelError("model.safetensors: no tensor x"), 400, {}),
        (DeadlineError("too slow"), 504, {}),
    ],
)
async def test_errors_before_the_first_token_have_a_status(
    api: Served, error: MeshError, status: int, headers: dict[str, str], stream: bool
) -> None:
    async def fail(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("queued")
        raise error

    api.mesh.script = fail
    async with api.http.post("/v1/chat/completions", json={"messages": USER, "stream": stream}) as reply:
        assert reply.status == status
        body = await reply.json()
        assert headers.items() <= reply.headers.items()
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert (body["error"]["message"], body["error"]["code"]) == (str(error), error.code)


@pytest.mark.parametrize("error", [StageLostError("no peer can hold it now"), RuntimeError("a bug")])
async def test_errors_inside_a_stream_are_its_last_event(api: Served, error: Exception) -> None:
    async def fail(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield TokenEvent(0, api.mesh.text.encode_text("Hello")[0])
        raise error

    api.mesh.script = fail
    async with api.http.post("/v1/chat/completions", json={"messages": USER, "stream": True}) as reply:
        assert reply.status == 200
        frames = (await reply.read()).decode().split("\n\n")
    assert b"[DONE]" not in "".join(frames).encode()
    code = error.code if isinstance(error, MeshError) else "internal_error"
    assert json.loads(frames[-2].removeprefix("data: "))["error"]["code"] == code
    with pytest.raises(openai.APIError):
        async for _ in await api.openai.chat.completions.create(model=MODEL, messages=USER, stream=True):
            pass


async def test_a_bug_is_a_500_that_does_not_quote_it(api: Served) -> None:
    async def fail(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        raise RuntimeError("secret prompt")
        yield

    api.mesh.script = fail
    status, body = await api.chat()
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(body)


async def test_a_service_that_just_stops_is_an_error(api: Served) -> None:
    async def nothing(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        return
        yield

    api.mesh.script = nothing
    status, body = await api.chat()
    assert (status, body["error"]["code"]) == (500, "engine_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request(api: Served, stream: bool) -> None:
    started = asyncio.Event()

    async def for_ever(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield TokenEvent(0, api.mesh.text.encode_text("Hello")[0])
        started.set()
        await asyncio.Event().wait()

    api.mesh.script = for_ever
    call = asyncio.create_task(api.chat(stream=stream))
    await started.wait()
    assert api.mesh.running
    call.cancel()
    await api.mesh.ended.wait()
    assert api.mesh.running == {}


async def test_closing_the_sdk_stream_ends_the_request(api: Served) -> None:
    async def for_ever(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield TokenEvent(0, api.mesh.text.encode_text("Hello")[0])
        await asyncio.Event().wait()

    api.mesh.script = for_ever
    stream = await api.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
    await anext(stream)
    await stream.close()
    await api.mesh.ended.wait()


async def test_a_slow_reader_makes_the_generator_wait(api: Served) -> None:
    made = 0

    async def flood(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        nonlocal made
        token_id = api.mesh.text.encode_text("Hello")[0]
        while True:
            made += 1
            yield TokenEvent(made - 1, token_id)

    api.mesh.script = flood
    api.mesh.limit = 1 << 30
    async with api.http.post("/v1/chat/completions", json={"messages": USER, "stream": True}) as reply:
        await reply.content.readline()
        # The client stops reading at its own limit, the sockets fill up, and then the generator must stand still:
        # ten other requests come and go, and it has made nothing more.
        seen = -1
        while seen != made:
            seen = made
            for _ in range(10):
                async with api.http.get("/healthz"):
                    pass
        reply.close()
    await api.mesh.ended.wait()


async def test_a_client_that_stops_reading_loses_its_stream(mesh: ScriptedMesh) -> None:
    async def flood(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        token_id = mesh.text.encode_text("Hello")[0]
        for index in itertools.count():
            yield TokenEvent(index, token_id)

    mesh.script = flood
    async with (
        served(mesh, ApiOptions(stall_limit_s=0.2)) as api,
        api.http.post("/v1/chat/completions", json={"messages": USER, "stream": True}),
    ):
        await mesh.ended.wait()
        assert mesh.running == {}


@pytest.mark.parametrize("by_header", [False, True])
async def test_cancel_by_id_and_by_request_id(api: Served, by_header: bool) -> None:
    go_on = asyncio.Event()

    async def patient(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        token_id = api.mesh.text.encode_text("Hello")[0]
        yield TokenEvent(0, token_id)
        await go_on.wait()
        yield TokenEvent(1, token_id)

    api.mesh.script = patient
    body = {"messages": USER, "stream": True}
    async with api.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"}) as reply:
        first = json.loads((await reply.content.readline()).removeprefix(b"data: "))
        assert reply.headers["x-request-id"] == "mine-1"
        name = "mine-1" if by_header else first["id"]
        async with api.http.post(f"/v1/cancel/{name}") as cancelled:
            assert (cancelled.status, (await cancelled.json())["cancelled"]) == (200, True)
        go_on.set()
        assert b'"code":"cancelled"' in await reply.read()
    async with api.http.post(f"/v1/cancel/{name}") as again:
        assert again.status == 404


async def test_a_cancelled_whole_reply_is_499(api: Served) -> None:
    async def cancel_me(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        await api.mesh.services.requests.cancel(request.request_id)
        yield TokenEvent(0, 1)

    api.mesh.script = cancel_me
    status, body = await api.chat()
    assert (status, body["error"]["code"]) == (499, "cancelled")


async def test_a_wish_for_more_tokens_than_fit_is_cut_to_the_room_and_a_header_says_so(api: Served) -> None:
    api.mesh.script = api.mesh.echo
    num_prompt = len(encode_chat(api.mesh.text, [{"role": "user", "content": "Hi"}]))
    room = api.mesh.limit - num_prompt
    for wanted, stream in ((api.mesh.limit, False), (api.mesh.limit, True), (-1, False)):
        body = {"model": MODEL, "messages": USER, "max_tokens": wanted, "stream": stream}
        async with api.http.post("/v1/chat/completions", json=body) as reply:
            assert reply.status == 200 and reply.headers["x-exo-mesh-max-tokens"] == str(room)
            await reply.read()
        assert api.mesh.request.max_tokens == room
    async with api.http.post("/v1/chat/completions", json={"model": MODEL, "messages": USER, "max_tokens": 7}) as reply:
        assert "x-exo-mesh-max-tokens" not in reply.headers, "the client's own wish"
        await reply.read()


@pytest.mark.parametrize(("limit", "made"), [(100_000, 4096), (256, None)])
async def test_without_a_wish_an_answer_has_at_most_4096_tokens_or_what_fits(
    api: Served, monkeypatch: pytest.MonkeyPatch, limit: int, made: int | None
) -> None:
    monkeypatch.setattr(api.mesh, "limit", limit)
    num_prompt = len(encode_chat(api.mesh.text, [{"role": "user", "content": "Hi"}]))
    async with api.http.post("/v1/chat/completions", json={"model": MODEL, "messages": USER}) as reply:
        await reply.read()
    assert api.mesh.request.max_tokens == (made or limit - num_prompt)
    assert reply.headers["x-exo-mesh-max-tokens"] == str(api.mesh.request.max_tokens)


async def test_a_prompt_too_large_for_the_context_is_refused_with_the_numbers(api: Served) -> None:
    status, body = await api.chat(messages=[{"role": "user", "content": "日本 " * 200}])
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "messages")
    status, body = await api.chat(messages=[{"role": "user", "content": "日本 " * 60_000}])
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "messages")
    assert "characters and more than 256 tokens" in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [65] * 258, "max_tokens": 0, "echo": True}, "prompt"),
        ("/v1/completions", {"prompt": [65] * 257, "max_tokens": 1}, "prompt"),
    ],
)
async def test_a_prompt_that_is_too_long_by_two_tokens_says_so_for_any_length_of_the_answer(
    api: Served, path: str, body: dict[str, Any], param: str
) -> None:
    async with api.http.post(path, json={"model": MODEL, **body}) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "holds at most 256 tokens" in error["message"] and "by at least 2 tokens" in error["message"]


async def test_an_unknown_model_is_a_404(api: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.openai.chat.completions.create(model="no/such", messages=USER)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_the_model_may_be_left_out_if_there_is_no_doubt(api: Served) -> None:
    for names, model in ((("one",), "one"), (("one", MODEL), MODEL)):
        api.mesh.names = names
        _, body = await api.chat()
        assert body["model"] == model
    api.mesh.names = ("one", "two")
    status, body = await api.chat()
    assert (status, body["error"]["param"]) == (400, "model")
    assert "one, two" in body["error"]["message"]


async def test_completions_take_text_and_ids(api: Served) -> None:
    ids = api.mesh.text.encode_text("Hello")
    for prompt in ("Hello", ["Hello"], ids, [ids]):
        reply = await api.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=50)  # type: ignore[arg-type]
        assert list(api.mesh.request.prompt_ids) == ids
        assert (reply.object, reply.choices[0].text) == ("text_completion", "Hello, world!")
        assert reply.id.startswith("cmpl-")
    await api.openai.completions.create(model=MODEL, prompt="Hello")
    assert api.mesh.request.max_tokens == 16


async def test_completions_stream_and_have_logprobs(api: Served) -> None:
    stream = await api.openai.completions.create(model=MODEL, prompt="Hello", max_tokens=50, stream=True, logprobs=1)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world!"
    assert chunks[-1].choices[0].finish_reason == "stop"
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert "".join(t for part in logprobs if part for t in part.tokens or []) == "Hello, world!"
    offsets = [offset for part in logprobs if part for offset in part.text_offset or []]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(["a"] * 129, "129 prompts"), ([1, "a"], "token ids"), ([], "no tokens"), ("", "no tokens"), ([99999], "99999")],
)
async def test_prompts_that_are_refused(api: Served, prompt: Any, message: str) -> None:
    async with api.http.post("/v1/completions", json={"prompt": prompt}) as reply:
        body = await reply.json()
    assert (reply.status, body["error"]["param"]) == (400, "prompt")
    assert message in body["error"]["message"]


async def test_the_loop_stays_free_while_a_template_runs_wild(mesh: ScriptedMesh, tmp_path: Path) -> None:
    """Health answers while a hostile template is being rendered, and the request ends with a 400."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    mesh.directory = write_text_model(tmp_path / "hostile", endless)
    async with served(mesh, ApiOptions(), templates=TemplateRenderer(0.5)) as api:
        call = asyncio.create_task(api.chat())
        num_answers = 0
        while not call.done():
            async with api.http.get("/healthz") as reply:
                assert reply.status == 200
            num_answers += 1
        status, body = await call
    assert (status, body["error"]["param"]) == (400, "messages")
    assert num_answers > 3


READY, LOADING, ON_DISK = (("i-1",), False), ((), True), ((), False)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"one": ON_DISK}, "one"),
        ({"one": READY, "two": ON_DISK}, "one"),
        ({"one": LOADING, "two": ON_DISK}, "one"),
        ({"one": LOADING, "two": READY, MODEL: ON_DISK}, MODEL),
        ({"one": READY, "two": READY, MODEL: ON_DISK}, MODEL),
        ({"one": ON_DISK, "two": READY, MODEL: LOADING}, MODEL),
        ({}, MODEL),
    ],
)
def test_a_request_without_a_model_gets_the_only_loaded_one_and_never_another_while_that_recovers(
    states: dict[str, tuple[tuple[str, ...], bool]], expected: str
) -> None:
    entries = [ModelEntry(name, ("peer1",), ready, 256, (), loading) for name, (ready, loading) in states.items()]
    assert choose_model(None, entries) == expected
    assert choose_model("two", entries) == "two"


def test_a_request_without_a_model_is_refused_where_several_could_be_meant() -> None:
    entries = [ModelEntry(name, ("peer1",), (), 256, (), is_loading=True) for name in ("one", "two")]
    with pytest.raises(InputError, match="several models: one, two"):
        choose_model(None, entries)
