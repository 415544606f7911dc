"""Tokens that follow each other quickly share a message; nothing else waits."""

from __future__ import annotations

import asyncio

import pytest

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import FinishReason, Prefilled
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner import mailbox as module
from exo_mesh.rings.runner.mailbox import FLUSH_AT, CallerUpdate, Drawn, DriverNews, Laps, Mailbox
from exo_mesh.rings.runner.sampling.sampler import Draw

TOKEN = Drawn((Draw(7),))


def update(news: DriverNews) -> CallerUpdate:
    return CallerUpdate(Ballot(1, "a"), news)


async def after_a_token() -> tuple[Mailbox, asyncio.Task[list[CallerUpdate]]]:
    """A mailbox whose first token has left, and a reader that waits for more after a second one has come."""
    mailbox = Mailbox()
    mailbox.post(update(TOKEN))
    assert len(await mailbox.next()) == 1, "the first token goes at once"
    mailbox.post(update(TOKEN))
    reader = asyncio.create_task(mailbox.next())
    for _ in range(5):
        await asyncio.sleep(0)
    return mailbox, reader


@pytest.fixture(autouse=True)
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_EVERY_S", 3600.0)


@pytest.mark.parametrize(
    "news",
    [Drawn((Draw(8),), FinishReason.LENGTH), Drawn((), FinishReason.STOP), EngineError("lost"), Prefilled(5)],
)
async def test_a_token_waits_for_others_until_something_comes_that_cannot_wait(news: DriverNews) -> None:
    mailbox, reader = await after_a_token()
    assert not reader.done()
    mailbox.post(update(TOKEN))
    mailbox.post(update(Laps(())))
    mailbox.post(update(news))
    async with asyncio.timeout(60):
        assert [one.news for one in await reader] == [TOKEN, TOKEN, Laps(()), news]


async def test_many_tokens_do_not_wait() -> None:
    mailbox, reader = await after_a_token()
    for _ in range(FLUSH_AT - 1):
        mailbox.post(update(TOKEN))
    assert not reader.done()
    mailbox.post(update(TOKEN))
    async with asyncio.timeout(60):
        assert len(await reader) == FLUSH_AT + 1


async def test_the_first_token_does_not_wait_for_the_news_before_it() -> None:
    mailbox = Mailbox()
    mailbox.post(update(Prefilled(5)))
    await mailbox.next()
    mailbox.post(update(TOKEN))
    async with asyncio.timeout(60):
        assert len(await mailbox.next()) == 1


async def test_a_late_token_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_EVERY_S", 0.0)
    mailbox = Mailbox()
    for _ in range(2):
        mailbox.post(update(TOKEN))
        async with asyncio.timeout(60):
            assert len(await mailbox.next()) == 1
