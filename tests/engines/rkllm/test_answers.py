"""Answers of a RKLLAMA in each of its interfaces: token by token, with our limits and stop strings."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from exo_mesh_rkllm.exchange import MAX_LINES

from exo_mesh.domain.request import FinishReason, SamplingParams
from exo_mesh.errors import ContextLengthError, InputError, ModelError, OverloadError
from tests.engines.rkllm.asking import DIALECTS, Got, answer, begin, chat, loaded
from tests.support.fake_rkllama import LENGTH, TODAY, FakeRkllama, Quirk, tokens_of

QUESTION = "Tell me of the river."


async def one_answer(request: Any, dialect: str = "ollama", **fields: Any) -> Got:
    async with loaded(FakeRkllama(dialect=dialect, **fields)) as engine:
        return await answer(engine, request)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_comes_token_by_token_in_every_interface(dialect: str) -> None:
    got = await one_answer(chat(QUESTION), dialect)
    assert [piece.text for piece in got.pieces] == tokens_of(QUESTION)
    assert (got.reason, got.usage.output_tokens) == (FinishReason.STOP, LENGTH)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_prompt_is_a_chat_of_one_message(dialect: str) -> None:
    request = msgspec.structs.replace(chat("x"), body={"prompt": QUESTION})
    assert (await one_answer(request, dialect)).text() == "".join(tokens_of(QUESTION))


@pytest.mark.parametrize("quirks", [TODAY, {*TODAY, Quirk.IGNORES_LIMIT}, {*TODAY, Quirk.NO_COUNTS}, set()])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_ends_at_its_limit_and_says_so(dialect: str, quirks: set[Quirk]) -> None:
    got = await one_answer(chat(QUESTION, 5), dialect, quirks=quirks)
    assert [piece.text for piece in got.pieces] == tokens_of(QUESTION)[:5]
    assert (got.reason, got.usage.output_tokens) == (FinishReason.LENGTH, 5)


async def test_a_request_for_no_tokens_does_not_reach_the_server() -> None:
    fake = FakeRkllama()
    async with loaded(fake) as engine:
        got = await answer(engine, chat(QUESTION, 0))
    assert (got.pieces, got.reason, fake.bodies) == ((), FinishReason.LENGTH, [])


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_ends_before_a_stop_string_that_spans_tokens(dialect: str) -> None:
    got = await one_answer(chat("say: one two three four", stops=("o thr", "zebra")), dialect)
    assert (got.text(), got.reason) == ("one tw", FinishReason.STOP)


async def test_what_looks_like_the_beginning_of_a_stop_string_is_not_lost() -> None:
    got = await one_answer(chat("say: one two", stops=("two three",)))
    assert got.text() == "one two"


async def test_an_answer_that_stops_at_its_last_token_is_finished() -> None:
    got = await one_answer(chat("say: one two END", 3, stops=("END",)))
    assert (got.text(), got.reason) == ("one two ", FinishReason.STOP)


async def test_no_stop_string_is_sent_because_the_server_ignores_them() -> None:
    fake = FakeRkllama()
    async with loaded(fake) as engine:
        await answer(engine, chat("say: one", stops=("two",)))
    assert "stop" not in fake.bodies[0] and "stop" not in fake.bodies[0]["options"]


async def test_two_requests_of_two_boards_do_not_mix() -> None:
    async with loaded(FakeRkllama()) as first, loaded(FakeRkllama()) as second:
        streams = first.generate(chat("say: a b c")), second.generate(chat("say: x y z"))
        turns = [[getattr(await anext(stream), "text", "") for stream in streams] for _ in range(3)]
        for stream in streams:
            await stream.aclose()
    assert turns == [["a", "x"], [" b", " y"], [" c", " z"]]


async def test_the_board_computes_one_request_at_a_time() -> None:
    fake = FakeRkllama(token_s=0.002)
    async with loaded(fake) as engine:
        first = engine.generate(chat(QUESTION))
        await anext(first)
        with pytest.raises(OverloadError, match="another request"):
            await answer(engine, chat("say: no"))
        await first.aclose()
        assert (await answer(engine, chat("say: yes"))).text() == "yes"
    assert fake.most_running == 1 and len(fake.bodies) == 2


async def test_usage_is_the_servers_count() -> None:
    usage = (await one_answer(chat("say: one two three"))).usage
    assert usage.prompt_tokens and usage.output_tokens == 3
    usage = (await one_answer(chat("say: one two three"), quirks={*TODAY, Quirk.NO_COUNTS})).usage
    assert (usage.prompt_tokens, usage.output_tokens) == (None, 3), "a count of 0 means that it is not known"


async def test_an_answer_that_fills_the_context_did_not_end_by_itself() -> None:
    async with loaded(FakeRkllama(), context_limit=10) as engine:
        got = await answer(engine, chat("say: one two three four five six seven eight nine"))
    assert got.reason is FinishReason.LENGTH


async def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    async with loaded(FakeRkllama(), context_limit=4) as engine:
        with pytest.raises(ContextLengthError, match="room for 4"):
            await answer(engine, chat("say: "))


@pytest.mark.parametrize(
    ("param", "sampling", "body"),
    [
        ("logit_bias", {"logit_bias": ((1, 2.0),)}, {}),
        ("repeat_last_n", {"repetition_penalty": 1.1, "repetition_window": 64}, {}),
        ("logprobs", {"logprobs": 0}, {}),
        ("min_p", {"min_p": 0.1}, {}),
        ("seed", {"temperature": 0.5}, {"seed": 7}),
        ("response_format", {}, {"response_format": {"type": "json_object"}}),
        ("tool_choice", {}, {"tools": [{}], "tool_choice": "required"}),
        ("chat_template_kwargs", {}, {"chat_template_kwargs": {"date": "today"}}),
        ("messages", {}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("prompt", {}, {"prompt": "<|im_start|>user\nhi<|im_end|>"}),
    ],
)
async def test_what_the_server_would_ignore_is_refused_by_name(
    param: str, sampling: dict[str, Any], body: dict[str, Any]
) -> None:
    asked = chat("say: x")
    body = body if "prompt" in body else {**asked.body, **body}
    request = msgspec.structs.replace(asked, body=body, sampling=SamplingParams(**sampling))
    fake = FakeRkllama()
    async with loaded(fake) as engine:
        with pytest.raises(InputError) as caught:
            await answer(engine, request)
        assert (caught.value.param, fake.bodies) == (param, [])
        assert (await answer(engine, chat("say: x"))).text() == "x"


async def test_old_servers_have_no_tools() -> None:
    with pytest.raises(InputError, match="no tools"):
        await one_answer(chat("say: x", tools=[{}]), "native")


async def test_sampling_is_sent_under_the_names_of_the_server() -> None:
    fake = FakeRkllama()
    sampling = SamplingParams(0.7, 40, 0.9, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)
    async with loaded(fake) as engine:
        await answer(engine, msgspec.structs.replace(chat("say: x", 7), sampling=sampling))
        await answer(engine, chat("say: x", 7))
    assert fake.bodies[0]["options"] == {
        "temperature": 0.7, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "num_predict": 7,
    }  # fmt: skip
    assert (fake.bodies[1]["options"]["temperature"], fake.bodies[1]["options"]["top_k"]) == (1.0, 1), "greedy"


@pytest.mark.parametrize(
    ("body", "think"),
    [
        ({}, None), ({"reasoning_effort": "none"}, False), ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)  # fmt: skip
async def test_thinking_is_left_to_the_modelfile_unless_it_is_asked_for(
    body: dict[str, Any], think: bool | None
) -> None:
    fake = FakeRkllama()
    async with loaded(fake) as engine:
        await answer(engine, chat("say: x", **body))
    assert fake.bodies[0].get("think") is think


async def test_messages_are_sent_as_texts_and_past_calls_as_objects() -> None:
    fake = FakeRkllama()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "say: "}, {"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    async with loaded(fake) as engine:
        assert (await answer(engine, chat("", messages=messages))).text() == "x"
    system, user, assistant, tool = fake.bodies[0]["messages"]
    assert (system["role"], user["content"], tool["tool_call_id"]) == ("system", "say: x", "c")
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1} and assistant["content"] == ""


async def test_a_missing_model_is_named_with_those_that_exist() -> None:
    with pytest.raises(ModelError, match=r"no model nowhere; it has Qwen3-1\.7B, TinyLlama 1\.1B"):
        async with loaded(FakeRkllama(), model="nowhere"):
            pass


async def test_an_answer_that_is_longer_than_the_buffer_reaches_a_slow_reader_whole() -> None:
    words = " ".join(f"w{index}" for index in range(4 * MAX_LINES))
    got, fake = [], FakeRkllama()
    async with loaded(fake) as engine, asyncio.timeout(10):
        async for event in engine.generate(chat(f"say: {words}", 10_000)):
            got.append(getattr(event, "text", ""))
            while fake.num_running:
                await asyncio.sleep(0.01)
    assert "".join(got) == words


async def test_a_cancelled_answer_that_gave_nothing_leaves_the_engine_usable() -> None:
    async with loaded(FakeRkllama(token_s=0.01)) as engine:
        await begin(engine.generate(chat("say: a b c")), 1)
        assert (await answer(engine, chat("say: next"))).text() == "next"
