"""Checks that closing an answer early ends it, here and at the server."""

from __future__ import annotations

import pytest

from exo_mesh.engine.conformance_whole.asking import answer, loaded, question, run, take, until
from exo_mesh.engine.conformance_whole.subject import WholeSubject

__all__ = ["test_after_a_cancelled_answer_the_next_one_is_served", "test_cancelling_stops_the_server"]

STOPS_WITHIN_S = 5.0


def test_after_a_cancelled_answer_the_next_one_is_served(running_subject: WholeSubject) -> None:
    async def work() -> None:
        async with loaded(running_subject) as engine:
            taken = await take(engine.generate(question()), 2)
            assert len(taken) == 2
            assert (await answer(engine, question(max_tokens=4))).text
            await engine.check()

    run(work())


def test_cancelling_stops_the_server(running_subject: WholeSubject) -> None:
    server = running_subject.server
    if not running_subject.stops_when_cancelled:
        pytest.skip("the server goes on after its client has gone")
    if server.num_running() is None:
        pytest.skip("the server cannot say how many answers it computes")

    async def work() -> None:
        async with loaded(running_subject) as engine:
            # far more tokens than can be computed within STOPS_WITHIN_S
            await take(engine.generate(question(max_tokens=100_000)), 2)
            await until(lambda: server.num_running() == 0, STOPS_WITHIN_S)

    run(work())
