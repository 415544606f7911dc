"""Checks that an answer comes in pieces, ends once, and keeps to its limit."""

from __future__ import annotations

import asyncio

import msgspec

from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.text_pieces import TextPiece
from exo_mesh.engine.conformance_whole.asking import SOME_TOKENS, answer, loaded, question, run
from exo_mesh.engine.conformance_whole.subject import WholeSubject

__all__ = [
    "test_a_prompt_is_answered_as_a_chat_is",
    "test_an_answer_comes_in_pieces_and_ends_once",
    "test_an_answer_ends_at_its_limit_and_says_so",
    "test_as_many_requests_as_slots_run_at_once",
    "test_the_same_question_has_the_same_answer_at_temperature_zero",
]

MOST_AT_ONCE = 4


def test_an_answer_comes_in_pieces_and_ends_once(running_subject: WholeSubject) -> None:
    async def work() -> None:
        async with loaded(running_subject) as engine:
            got = await answer(engine, question())
        assert len(got.pieces) > 1
        assert all(piece.text or piece.kind == "call" for piece in got.pieces), "no piece is empty"
        usage = got.end.usage
        assert usage.output_tokens is None or 0 < usage.output_tokens <= SOME_TOKENS
        assert usage.prompt_tokens is None or usage.prompt_tokens > 0

    run(work())


def test_an_answer_ends_at_its_limit_and_says_so(running_subject: WholeSubject) -> None:
    async def work() -> None:
        async with loaded(running_subject) as engine:
            long = await answer(engine, question(max_tokens=12))
            short = await answer(engine, question(max_tokens=4))
        assert short.end.reason is FinishReason.LENGTH
        assert long.text.startswith(short.text) and len(short.text) < len(long.text)

    run(work())


def test_the_same_question_has_the_same_answer_at_temperature_zero(running_subject: WholeSubject) -> None:
    async def work() -> None:
        async with loaded(running_subject) as engine:
            first, second = await answer(engine, question()), await answer(engine, question())
        assert (first.text, first.end.reason) == (second.text, second.end.reason)

    run(work())


def test_a_prompt_is_answered_as_a_chat_is(running_subject: WholeSubject) -> None:
    async def work() -> None:
        request = msgspec.structs.replace(question(max_tokens=8), body={"prompt": "Once upon a time"})
        async with loaded(running_subject) as engine:
            got = await answer(engine, request)
        assert got.text and all(isinstance(piece, TextPiece) and piece.kind == "text" for piece in got.pieces)

    run(work())


def test_as_many_requests_as_slots_run_at_once(running_subject: WholeSubject) -> None:
    async def work() -> None:
        async with loaded(running_subject) as engine:
            count = min(engine.slots, MOST_AT_ONCE)
            asked = [question(f"Story number {index}, please.", max_tokens=8) for index in range(count)]
            got = await asyncio.gather(*(answer(engine, request) for request in asked))
        assert all(one.text for one in got)

    run(work())
