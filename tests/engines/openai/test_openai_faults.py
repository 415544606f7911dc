"""A model server that fails, refuses, stalls or sends nonsense ends a request with the error that fits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from exo_mesh_openai.client import Deadlines
from exo_mesh_openai.sse import EventReader, StreamEvent
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.text_pieces import NO_USAGE, TextPiece
from exo_mesh.errors import (
    ContextLengthError,
    EngineError,
    InputError,
    MeshError,
    ModelError,
    OverloadError,
    StageLostError,
)
from tests.support.fake_openai import FAULT_AFTER, FakeModelServer
from tests.support.openai_engine import chat, collect, joined, loaded_from

SOON, LATER = 0.4, 30.0
"""Injected deadlines: the one that a test waits for, and all others, which a busy machine must not reach."""


async def failing(server: FakeModelServer, deadlines: Deadlines | None = None) -> tuple[list[TextPiece], MeshError]:
    """What came before the error, and the error."""
    got: list[TextPiece] = []
    async with loaded_from(server, deadlines) as engine:
        with pytest.raises(MeshError) as caught:
            async for event in engine.generate(chat()):
                assert isinstance(event, TextPiece), "the answer ended without its error"
                got.append(event)
    return got, caught.value


@pytest.mark.parametrize(
    ("switch", "kind", "says"),
    [
        ("garbage", EngineError, "not JSON"),
        ("noise", EngineError, "belongs to no event"),
        ("huge-line", EngineError, "more than 1048576 bytes"),
        ("error-event", EngineError, "the slot failed"),
        ("error-field", ContextLengthError, "maximum context length is 7"),
        ("cut", StageLostError, "broke the connection"),
    ],
)
async def test_a_fault_in_mid_answer_is_an_error_after_the_pieces_before_it(
    switch: str, kind: type[MeshError], says: str
) -> None:
    got, error = await failing(FakeModelServer("vllm", frozenset({switch})))
    assert type(error) is kind and says in str(error)
    assert len(got) == FAULT_AFTER


async def test_a_stream_without_an_end_is_a_lost_stage() -> None:
    got, error = await failing(FakeModelServer("vllm", frozenset({"no-finish"})))
    assert isinstance(error, StageLostError) and "in mid-answer" in str(error)
    assert len(got) == 12


@pytest.mark.parametrize("switch", ["stall", "pings"])
async def test_a_server_that_stalls_in_mid_answer_is_a_lost_stage(switch: str) -> None:
    deadlines = Deadlines(first_token_s=LATER, between_tokens_s=SOON)
    got, error = await failing(FakeModelServer("vllm", frozenset({switch})), deadlines)
    assert isinstance(error, StageLostError) and "sent nothing for 0.4 s" in str(error)
    assert len(got) == FAULT_AFTER


async def test_a_server_that_never_begins_is_a_lost_stage() -> None:
    deadlines = Deadlines(first_token_s=SOON, between_tokens_s=LATER)
    got, error = await failing(FakeModelServer("vllm", frozenset({"stall-first"})), deadlines)
    assert isinstance(error, StageLostError) and "sent nothing for 0.4 s" in str(error)
    assert not got


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (400, {"error": {"message": "bad tools", "type": "invalid_request_error"}}, InputError, "bad tools"),
        (422, {"detail": "field required"}, InputError, "field required"),
        (400, {"error": {"message": "the request exceeds the available context size", "n_ctx": 7,
                         "type": "exceed_context_size_error"}}, ContextLengthError, "exceeds the available context"),
        (400, {"object": "error", "message": "This model's maximum context length is 7 tokens. You asked for 9"},
         ContextLengthError, "asked for 9"),
        (400, {"message": "The input (9 tokens) is longer than the model's context length (7 tokens)."},
         ContextLengthError, "9 tokens"),
        (500, {"error": {"message": "input is longer than the context length"}}, ContextLengthError, "longer"),
        (401, {"error": "no key"}, EngineError, "--openai-key-file"),
        (403, "forbidden", EngineError, "--openai-key-file"),
        (404, {"error": {"message": "model not found"}}, ModelError, "not found"),
        (429, {"error": {"message": "slow down"}}, OverloadError, "slow down"),
        (503, {"error": {"code": 503, "message": "Loading model"}}, OverloadError, "Loading model"),
        (500, "<html>oops</html>", EngineError, "oops"),
        (502, "", EngineError, "answers 502"),
        (307, "", EngineError, "redirects"),
    ],
)  # fmt: skip
async def test_a_refusal_is_the_error_that_fits(status: int, body: Any, kind: type[MeshError], says: str) -> None:
    _, error = await failing(FakeModelServer("vllm", failure=(status, body, {})))
    assert type(error) is kind and says in str(error)


@pytest.mark.parametrize(
    ("headers", "seconds"), [({}, 1.0), ({"Retry-After": "7"}, 7.0), ({"Retry-After": "soon"}, 1.0)]
)
async def test_a_busy_server_says_when_to_come_back(headers: Mapping[str, str], seconds: float) -> None:
    _, error = await failing(FakeModelServer("vllm", failure=(429, "busy", headers)))
    assert isinstance(error, OverloadError) and error.retry_after_s == seconds


async def test_a_long_message_of_a_server_is_cut() -> None:
    _, error = await failing(FakeModelServer("vllm", failure=(500, "word " * 100_000, {})))
    assert len(str(error)) < 700


async def test_an_answer_that_does_not_stream_is_refused() -> None:
    _, error = await failing(FakeModelServer("vllm", frozenset({"json"})))
    assert isinstance(error, EngineError) and "does not stream" in str(error)


@pytest.mark.parametrize("switches", [{"no-done"}, {"no-usage"}, {"no-done", "no-usage"}, {"two-halves"}])
async def test_an_answer_ends_well_without_what_is_not_needed(switches: set[str]) -> None:
    async with loaded_from(FakeModelServer("vllm", frozenset(switches))) as engine:
        pieces, end = await collect(engine, chat())
    assert len(pieces) == 12 and end.reason is FinishReason.LENGTH
    assert (end.usage == NO_USAGE) == ("no-usage" in switches)


async def test_a_server_that_ignores_the_limit_is_cut_off() -> None:
    server = FakeModelServer("vllm", frozenset({"ignores-limit"}), token_s=0.0)
    async with loaded_from(server) as engine:
        pieces, end = await collect(engine, chat(max_tokens=10))
    assert end.reason is FinishReason.LENGTH and len(pieces) == 4 * 10


async def until_idle(server: FakeModelServer) -> None:
    async with asyncio.timeout(5):
        while server.num_running:
            await asyncio.sleep(0.005)


async def test_closing_the_answer_aborts_the_request_at_the_server() -> None:
    server = FakeModelServer("vllm")
    async with loaded_from(server) as engine:
        events = engine.generate(chat(max_tokens=1000))
        await anext(events)
        assert server.num_running == 1
        await events.aclose()
        await until_idle(server)
    assert server.num_aborted == 1


async def test_cancelling_before_the_first_token_aborts_the_request_at_the_server() -> None:
    server = FakeModelServer("vllm", frozenset({"stall-first"}))
    async with loaded_from(server) as engine:
        waiting = asyncio.ensure_future(anext(engine.generate(chat())))
        async with asyncio.timeout(5):
            while not server.num_running:
                await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until_idle(server)
    assert server.num_aborted == 1


STREAM = b'data: {"a": 1}\r\n\r\n: ping\n\nevent: error\ndata: x\n\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
EVENTS = [StreamEvent('{"a": 1}'), StreamEvent("x", True), StreamEvent("one\ntwo"), StreamEvent("[DONE]")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_how_the_stream_was_cut(cuts: list[int]) -> None:
    places = sorted({0, *cuts, len(STREAM)})
    reader = EventReader()
    parts = [STREAM[start:stop] for start, stop in itertools.pairwise(places)]
    assert [event for part in parts for event in reader.feed(part)] == EVENTS


@pytest.mark.parametrize(
    "flood", [b"data: " + b"x" * 200, b"x" * 200, b"data: 12345678\n" * 20], ids=["line", "rest", "event"]
)
def test_a_flood_without_an_end_is_refused(flood: bytes) -> None:
    reader = EventReader(max_event_bytes=100)
    with pytest.raises(EngineError, match="more than 100 bytes"):
        reader.feed(flood)


@given(st.binary(max_size=300))
def test_any_bytes_are_events_or_an_engine_error(content: bytes) -> None:
    with contextlib.suppress(EngineError):
        EventReader(max_event_bytes=100).feed(content)


async def test_no_error_repeats_the_prompt_or_the_key() -> None:
    _, error = await failing(FakeModelServer("vllm", failure=(500, json.dumps({"error": "failed"}), {})))
    assert "Hello" not in str(error)


async def test_what_is_sent_goes_to_the_server_only() -> None:
    server = FakeModelServer("vllm", failure=(307, "", {"Location": "http://127.0.0.1:9/"}))
    _, error = await failing(server)
    assert "redirects" in str(error) and len(server.requests) == 1


async def test_pieces_are_joined_in_order() -> None:
    async with loaded_from(FakeModelServer("vllm")) as engine:
        pieces, _ = await collect(engine, chat())
        again, _ = await collect(engine, chat())
    assert joined(pieces) == joined(again) and len({piece.text for piece in pieces}) > 6
