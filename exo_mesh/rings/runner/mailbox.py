"""Carries updates from the driver to the call that waits for tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import (
    FinishReason,
    FrameTrace,
    Prefilled,
    PrefixReport,
    PromptLogprobs,
    Queued,
    TokenEvent,
    Tokens,
)
from exo_mesh.errors import MeshError

if TYPE_CHECKING:  # so deep in a chain of imports, NumPy takes 40 ms more: the interpreter's stack grows and shrinks
    from exo_mesh.rings.runner.sampling.sampler import Draw

FLUSH_EVERY_S = 0.02
"""Tokens that come within this time after a message with tokens share the next one: a person sees no faster steps, and
each message costs as much CPU time as a fast lap of the ring. A token that comes later is sent at once."""

FLUSH_AT = 64
"""As many updates are sent at once, too."""

PARK_AT = 256
"""Updates that a reader may be behind. More may be in the buffers of the connections."""


class Drawn(NamedTuple):
    """The result of one row of logits: output tokens in order, the first one drawn and the others forced, and why the
    request ends, if it does. cached: with the first token, the prompt tokens that came from the prefix cache.
    accepted, rejected: at the end, how many drafts became output, and how many did not."""

    draws: tuple[Draw, ...]
    finish: FinishReason | None = None
    cached: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether this is one token and nothing else."""
        return len(self.draws) == 1 and self.finish is None and not self.cached and self.draws[0].logprob is None

    def events(self, index: int) -> list[TokenEvent]:
        """The events for the caller. index: of the first token. A stop is an event of its own, without a token."""
        numbered = enumerate(self.draws, index)
        events = [TokenEvent(at, draw.token_id, draw.logprob, tuple(draw.top)) for at, draw in numbered]
        if self.finish is FinishReason.LENGTH and events:
            events[-1] = replace(events[-1], finish=self.finish)
        elif self.finish is not None:
            events.append(TokenEvent(index + len(events), None, finish=self.finish))
        if self.accepted or self.rejected:
            events[-1] = replace(events[-1], accepted=self.accepted, rejected=self.rejected)
        if self.cached and events:
            events[0] = replace(events[0], cached=self.cached)
        return events


class Laps(NamedTuple):
    """The laps of a traced request since the last update with laps."""

    frames: tuple[FrameTrace, ...]


DriverNews: TypeAlias = Drawn | Tokens | Queued | Prefilled | PrefixReport | PromptLogprobs | Laps | MeshError
"""What a caller learns of its request. Queued with place 0: it no longer waits. MeshError: it has failed."""


class CallerUpdate(msgspec.Struct, frozen=True):
    """ballot: in force when this was added. index: of the first token of Drawn."""

    ballot: Ballot
    news: DriverNews
    index: int = 0


class Mailbox:
    """Updates of one request, in order. `next` returns all that have come since its last call, for one message, because
    one message for each token would cost a fast ring a tenth of its speed.

    A mailbox holds little more than PARK_AT updates: the driver then parks the sequence until the reader has taken
    them.
    """

    def __init__(self) -> None:
        self.parked = False
        self._queue: asyncio.Queue[CallerUpdate] = asyncio.Queue()
        self._is_due = asyncio.Event()
        self._flushed_at = float("-inf")

    @property
    def backlog(self) -> int:
        """The number of updates that wait for their reader."""
        return self._queue.qsize()

    def post(self, update: CallerUpdate) -> None:
        self._queue.put_nowait(update)
        if self._queue.qsize() >= FLUSH_AT or not may_wait(update.news):
            self._is_due.set()

    def take(self) -> CallerUpdate:
        """The oldest update. There must be one."""
        return self._queue.get_nowait()

    async def next(self) -> list[CallerUpdate]:
        """Return all updates since the last call. Waits as long as the request lives, which the driver limits."""
        updates = [await self._queue.get()]
        if (early := self._flushed_at + FLUSH_EVERY_S - time.monotonic()) > FLUSH_EVERY_S / 8:  # or a timer for nothing
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(early):
                    await self._is_due.wait()
        # a message with prompt log-probabilities is already as large as a message should be
        while not self._queue.empty() and not isinstance(updates[-1].news, PromptLogprobs):
            updates.append(self.take())
        if self._queue.empty():
            self._is_due.clear()
        if any(isinstance(update.news, Drawn) for update in updates):
            self._flushed_at = time.monotonic()
        return updates


def may_wait(news: DriverNews) -> bool:
    """Whether the update only adds to an answer that goes on."""
    return isinstance(news, Laps) or (isinstance(news, Drawn) and news.finish is None)
