"""What others may read of the answers that run here: order, bounds, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from exo_mesh.domain.request import (
    FinishReason,
    Progress,
    PromptLogprob,
    PromptLogprobs,
    RequestEvent,
    TokenEvent,
    TokenLogprob,
)
from exo_mesh.errors import CancelledRequestError, InputError, OverloadError, StageLostError
from exo_mesh.rings.serving.calls import events_from_proto, events_to_proto
from exo_mesh.rings.serving.live import LiveChoice, LiveStreams
from exo_mesh.rings.serving.streams import StreamCard, StreamViewer, hash_of_secret

ADMIN = StreamViewer(None)
CARD = StreamCard("s1", "m", 7, ("r1",), "", hash_of_secret("x"), lambda: b"recipe")
TOP = (TokenLogprob(3, -1.0),)
ANSWER: list[RequestEvent] = [
    Progress("queued", 2, 5, 1.5),
    Progress("prefill", 4, 8),
    PromptLogprobs((PromptLogprob(1, -0.5, TOP), PromptLogprob(2, -0.25, TOP))),
    *(TokenEvent(index, 100 + index, -0.5, TOP) for index in range(600)),
    TokenEvent(600, None, finish=FinishReason.STOP),
]


async def read(choice: LiveChoice) -> list[RequestEvent]:
    async with aclosing(choice.follow()) as batches:
        return [event async for batch in batches for event in batch]


def told(events: Sequence[RequestEvent]) -> list[RequestEvent]:
    return [event for event in events if not isinstance(event, Progress)]


async def test_a_reader_gets_all_events_in_order_whenever_it_comes() -> None:
    live = LiveStreams()
    with live.open(CARD):
        choice = live.choice("r1")
        assert choice is not None
        early = asyncio.create_task(read(choice))
        await asyncio.sleep(0)
        for event in ANSWER[:300]:
            live.add(choice, event)
            await asyncio.sleep(0)
        middle = asyncio.create_task(read(choice))
        await asyncio.sleep(0)
        for event in ANSWER[300:]:
            live.add(choice, event)
        found = [await early, await middle, await read(choice)]
    assert [told(one) for one in found] == [told(ANSWER)] * 3
    assert found[0][:2] == ANSWER[:2], "progress, as it came"


@pytest.mark.parametrize("error", [StageLostError("gone"), None])
async def test_a_reader_ends_as_the_answer_does(error: StageLostError | None) -> None:
    live = LiveStreams()
    with live.open(CARD):
        choice = live.choice("r1")
        assert choice is not None
        live.add(choice, TokenEvent(0, 5))
        reader = asyncio.create_task(read(choice))
        await asyncio.sleep(0)
        if error is not None:
            choice.end(error)
    with pytest.raises(CancelledRequestError if error is None else StageLostError):
        await reader
    assert live.choice("r1") is None and live.find(ADMIN) == []


async def test_an_answer_that_is_too_long_for_all_is_kept_no_longer() -> None:
    live = LiveStreams(max_tokens=10)
    with live.open(CARD):
        choice = live.choice("r1")
        assert choice is not None
        for index in range(20):
            live.add(choice, TokenEvent(index, 5))
        assert choice.num_tokens == 10
        with pytest.raises(OverloadError):
            await read(choice)
    with live.open(CARD):
        again = live.choice("r1")
        assert again is not None
        live.add(again, TokenEvent(0, 5, finish=FinishReason.LENGTH))
        assert told(await read(again)) == [TokenEvent(0, 5, finish=FinishReason.LENGTH)], "its room is free again"


async def test_who_may_see_an_answer() -> None:
    live = LiveStreams()
    keyed = StreamCard("s2", "m", 8, ("r2",), "k1", b"", lambda: b"")
    viewers = {
        "admin": ADMIN,
        "owner": StreamViewer("k1"),
        "other key": StreamViewer("k2"),
        "secret": StreamViewer("", hash_of_secret("x")),
        "guess": StreamViewer("", hash_of_secret("y")),
        "nothing": StreamViewer(""),
    }
    with live.open(CARD), live.open(keyed):
        seen = {name: {found.id for found in live.find(viewer)} for name, viewer in viewers.items()}
        with pytest.raises(InputError):
            live.follow(viewers["guess"], "s1", "r1")
        with pytest.raises(InputError):
            live.follow(viewers["secret"], "s1", "r2")
        assert live.find(ADMIN, "s1")[0].recipe == b"recipe"
    assert seen == {
        "admin": {"s1", "s2"}, "owner": {"s2"}, "other key": set(), "secret": {"s1"}, "guess": set(), "nothing": set()
    }  # fmt: skip


def test_events_cross_the_wire_unchanged() -> None:
    assert events_from_proto(events_to_proto(ANSWER[1:])) == ANSWER[1:]
