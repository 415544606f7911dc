"""The unmodified openai-python client against each peer of a mesh of two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.peers import MODEL, Peer, await_all

COUNT: Any = [{"role": "user", "content": "Count from 7 to 12."}]
COUNTED = "7, 8, 9, 10, 11, 12"
REPEAT: Any = [{"role": "user", "content": "Repeat: Grüße 🚀"}]
CONTEXT = 8192
ENDLESS: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
"""Goes on for a minute if nobody stops it."""


@contextmanager
def client_of(peer: Peer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{peer.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(params=[0, 1], ids=["first peer", "second peer"])
def client(request: pytest.FixtureRequest, pair: list[Peer]) -> Iterator[OpenAI]:
    with client_of(pair[request.param]) as made:
        yield made


@pytest.fixture(
    params=[pytest.param(0, id="first peer", marks=pytest.mark.extended), pytest.param(1, id="second peer")]
)
def client_of_one(request: pytest.FixtureRequest, pair: list[Peer]) -> Iterator[OpenAI]:
    """For what takes long; the first peer does not drive the ring, the second one does."""
    with client_of(pair[request.param]) as made:
        yield made


def test_chat(client: OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=COUNT)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", COUNTED, "stop")
    assert (reply.object, reply.model, choice.logprobs) == ("chat.completion", MODEL, None)
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens > len(COUNTED.split(", "))


def test_stream_with_usage(client: OpenAI) -> None:
    whole, cached = (client.chat.completions.create(model=MODEL, messages=REPEAT) for _ in range(2))
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=REPEAT, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content == "Grüße 🚀"
    assert all("\ufffd" not in (delta.content or "") for delta in deltas), "half a character was sent"
    assert len([delta for delta in deltas if delta.content]) > 3
    assert deltas[0].role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-1].choices == []
    for usage in (one for one in (chunks[-1].usage, cached.usage) if one is not None):
        usage.completion_tokens_details = None  # how much was drafted depends on measured times
    assert chunks[-1].usage == cached.usage is not None, "the prompt is known from the first time"
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_logprobs(client: OpenAI) -> None:
    choice = client.chat.completions.create(model=MODEL, messages=REPEAT, logprobs=True, top_logprobs=5).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == choice.message.content
    for token in tokens:
        top = [entry.logprob for entry in token.top_logprobs]
        assert len(top) == 5 and top == sorted(top, reverse=True)
        assert 0 < sum(map(math.exp, top)) <= 1 + 1e-5
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
        assert bytes(token.bytes or []).decode(errors="replace") == token.token


def test_stop_string_across_tokens(client: OpenAI) -> None:
    wanted: Any = {"model": MODEL, "messages": COUNT, "stop": [", 10, 1"]}
    choice = client.chat.completions.create(**wanted).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("7, 8, 9", "stop")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**wanted, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "7, 8, 9"
    assert chunks[-1].finish_reason == "stop"


def test_seed(client_of_one: OpenAI) -> None:
    def draw(seed: int) -> str:
        reply = client_of_one.completions.create(
            model=MODEL, prompt="Zq", temperature=1, frequency_penalty=1, seed=seed, extra_body={"ignore_eos": True}
        )
        return reply.choices[0].text

    texts = [draw(seed) for seed in (1, 2, 3)]
    assert len(set(texts)) == 3
    assert draw(2) == texts[1]


def test_max_tokens(client: OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        limit: Any = {name: 5}
        reply = client.chat.completions.create(model=MODEL, messages=COUNT, **limit)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None and reply.usage.completion_tokens == 5
        assert COUNTED.startswith(reply.choices[0].message.content or "-")


def test_models(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.extended
def test_closing_a_stream_frees_the_ring(client_of_one: OpenAI, pair: list[Peer]) -> None:
    await_all(pair, Peer.idle)
    with client_of_one.chat.completions.create(**ENDLESS, stream=True) as stream:
        assert next(iter(stream)).choices
        await_all(pair, Peer.busy)
    await_all(pair, Peer.idle)


def test_a_client_that_gives_up_on_a_whole_reply_frees_the_ring(client_of_one: OpenAI, pair: list[Peer]) -> None:
    with pytest.raises(openai.APITimeoutError):
        client_of_one.with_options(timeout=0.7).chat.completions.create(**ENDLESS)
    await_all(pair, Peer.idle)


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="exo-mesh-dem") as unknown:
        client.chat.completions.create(model="exo-mesh-dem", messages=COUNT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")
    with pytest.raises(openai.BadRequestError, match="frobnicate") as field:
        client.chat.completions.create(model=MODEL, messages=COUNT, extra_body={"frobnicate": 1})
    assert (field.value.code, field.value.param) == ("invalid_request", "frobnicate")
    with pytest.raises(openai.BadRequestError, match="temperature is 3") as value:
        client.chat.completions.create(model=MODEL, messages=COUNT, temperature=3)
    assert value.value.param == "temperature"


@pytest.mark.parametrize("stream", [False, True])
def test_over_the_context_limit(client: OpenAI, stream: bool) -> None:
    long: Any = [{"role": "user", "content": "7 " * 9000}]
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as prompt:
        client.chat.completions.create(model=MODEL, messages=long, stream=stream)
    assert prompt.value.code == "context_length_exceeded"


async def test_the_async_client(pair: list[Peer]) -> None:
    for peer in pair:
        async with AsyncOpenAI(base_url=f"{peer.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
            reply = await client.chat.completions.create(model=MODEL, messages=COUNT)
            assert reply.choices[0].message.content == COUNTED
            stream = await client.chat.completions.create(model=MODEL, messages=COUNT, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == COUNTED
            async with await client.chat.completions.create(**ENDLESS, stream=True) as endless:
                await anext(aiter(endless))
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="none", messages=COUNT)
    await_all(pair, Peer.idle)
