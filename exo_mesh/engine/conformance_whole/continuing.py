"""Checks that an engine which claims to continue answers goes on exactly after the beginning that it is given."""

from __future__ import annotations

import msgspec
import pytest

from exo_mesh.domain.whole.text_pieces import text_of
from exo_mesh.engine.conformance_whole.asking import SOME_TOKENS, answer, loaded, question, run, take
from exo_mesh.engine.conformance_whole.subject import WholeSubject

__all__ = ["test_a_begun_answer_is_continued_and_not_repeated", "test_a_begun_prompt_is_continued_and_not_repeated"]


def test_a_begun_answer_is_continued_and_not_repeated(running_subject: WholeSubject) -> None:
    async def work() -> None:
        async with loaded(running_subject) as engine:
            if not engine.continues:
                pytest.skip("the engine asks for the whole answer again")
            whole = await answer(engine, question())
            begun = await take(engine.generate(question()), SOME_TOKENS // 4)
            rest = await answer(engine, question(begun=begun))
        assert rest.text and text_of(begun) + rest.text == whole.text
        counts = (rest.end.usage.output_tokens, whole.end.usage.output_tokens)
        assert None in counts or counts[0] == counts[1], "the tokens of the beginning count"

    run(work())


def test_a_begun_prompt_is_continued_and_not_repeated(running_subject: WholeSubject) -> None:
    async def work() -> None:
        request = msgspec.structs.replace(question(max_tokens=20), body={"prompt": "Once upon a time"})
        async with loaded(running_subject) as engine:
            if not engine.continues:
                pytest.skip("the engine asks for the whole answer again")
            whole = await answer(engine, request)
            begun = await take(engine.generate(request), 5)
            rest = await answer(engine, msgspec.structs.replace(request, begun=tuple(begun)))
        assert rest.text and text_of(begun) + rest.text == whole.text

    run(work())
