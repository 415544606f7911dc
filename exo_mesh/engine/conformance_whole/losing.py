"""Checks that a server which is gone is reported as a lost stage, and that the engine serves again when it is back."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from exo_mesh.domain.whole.text_pieces import TextPiece
from exo_mesh.engine.conformance_whole.asking import answer, loaded, question, run
from exo_mesh.engine.conformance_whole.subject import WholeSubject
from exo_mesh.errors import EngineError, StageLostError

__all__ = [
    "test_a_server_killed_in_mid_answer_is_a_lost_stage",
    "test_a_server_that_is_gone_is_a_lost_stage_and_fails_the_check",
]


def test_a_server_killed_in_mid_answer_is_a_lost_stage(running_subject: WholeSubject) -> None:
    async def work() -> list[TextPiece]:
        got: list[TextPiece] = []
        long = question(max_tokens=running_subject.long_answer)
        async with loaded(running_subject) as engine, aclosing(engine.generate(long)) as events:
            with pytest.raises(StageLostError):
                async for event in events:
                    assert isinstance(event, TextPiece), "the answer ended before the server was killed"
                    got.append(event)
                    running_subject.server.kill()
        return got

    assert run(work()), "what came before the end stands"


def test_a_server_that_is_gone_is_a_lost_stage_and_fails_the_check(running_subject: WholeSubject) -> None:
    async def work() -> None:
        async with loaded(running_subject) as engine:
            running_subject.server.kill()
            with pytest.raises(StageLostError):
                await answer(engine, question(max_tokens=4))
            with pytest.raises(EngineError):
                await engine.check()
            running_subject.server.start()
            await engine.check()
            assert (await answer(engine, question(max_tokens=4))).text

    run(work())
