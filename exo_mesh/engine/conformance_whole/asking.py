"""Runs the coroutines of an engine in a test, and the questions that the tests ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from exo_mesh.domain.request import SamplingParams
from exo_mesh.domain.whole.served import ServedModel, ServerReport
from exo_mesh.domain.whole.text_pieces import TextPiece, text_of
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.engine.conformance_whole.subject import WholeSubject
from exo_mesh.engine.whole import ModelServer, WholeLoadRequest, WholeModelEngine

__all__ = ["running_subject"]

DEADLINE_S = 60.0
"""Of one test; an engine that takes longer hangs."""

SOME_TOKENS = 40
"""The limit of an answer that has several pieces."""

T = TypeVar("T")


@pytest.fixture
def running_subject(whole_subject: WholeSubject) -> Iterator[WholeSubject]:
    """The subject, with its server running before and after the test."""
    whole_subject.server.start()
    yield whole_subject
    whole_subject.server.start()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on an event loop of its own, within a deadline. Fails if it leaves tasks behind."""

    async def bounded() -> T:
        async with asyncio.timeout(DEADLINE_S):
            result = await work
        await asyncio.sleep(0)  # a task that has just been cancelled ends in the next round of the loop
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        return result

    return asyncio.run(bounded())


async def until(condition: Callable[[], object], within_s: float) -> None:
    """Waits until the condition holds; fails after the time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition is at the server
            await asyncio.sleep(0.01)


async def look(subject: WholeSubject) -> Sequence[ServerReport]:
    """What the provider reports of its servers. Fails if it has no `look`."""
    provider = subject.load_provider()
    assert isinstance(provider, ModelServer), "the provider has no look: the node cannot find its models"
    return await provider.look(subject.options)


async def first_model(subject: WholeSubject) -> ServedModel:
    """The first model of the first server that is up."""
    reports = await look(subject)
    models = [model for report in reports if report.is_up for model in report.models]
    assert models, f"no server is up with a model: {reports}"
    return models[0]


@asynccontextmanager
async def loaded(subject: WholeSubject) -> AsyncIterator[WholeModelEngine]:
    """An engine that has loaded the first model."""
    model = await first_model(subject)
    engine = subject.load_provider().create()
    try:
        await engine.load(WholeLoadRequest(model, subject.options), lambda done, total: None)
        yield engine
    finally:
        await engine.close()


def question(
    text: str = "Tell me a long story.", *, max_tokens: int = SOME_TOKENS, begun: Sequence[TextPiece] = ()
) -> TextRequest:
    """A chat of one message, greedy."""
    body = {"messages": [{"role": "user", "content": text}]}
    return TextRequest("test", body, max_tokens, SamplingParams(temperature=0.0, seed=1), begun=tuple(begun))


@dataclass(frozen=True)
class WholeAnswer:
    """The pieces of an answer, and its end."""

    pieces: tuple[TextPiece, ...]
    end: TextEnd

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and tool calls."""
        return text_of(self.pieces)


async def answer(engine: WholeModelEngine, request: TextRequest) -> WholeAnswer:
    """The whole answer. Fails if its end is missing, or is not the last event."""
    events = [event async for event in engine.generate(request)]
    pieces = tuple(event for event in events if isinstance(event, TextPiece))
    ends = [event for event in events if isinstance(event, TextEnd)]
    assert len(ends) == 1 and events[-1] is ends[0], f"an answer has one TextEnd, as its last event: {events[-3:]}"
    return WholeAnswer(pieces, ends[0])


async def take(events: AsyncGenerator[TextEvent, None], count: int) -> list[TextPiece]:
    """The first `count` pieces of an answer, which is then closed."""
    taken: list[TextPiece] = []
    async with aclosing(events):
        async for event in events:
            assert isinstance(event, TextPiece), f"the answer ended after {len(taken)} pieces"
            taken.append(event)
            if len(taken) == count:
                break
    return taken
