"""Carries messages from the driver to the call that waits for tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from exo_mesh.wire.proto import driver_pb2 as pb

Write = Callable[[pb.GenerateEvents], None]
"""Writes one update into a message that may hold others."""

FLUSH_EVERY_S = 0.005
"""Tokens that come within this time share a message: one message per token would cost more than a fast lap of the ring.
A token that comes later than this after the last message is sent at once."""

PARK_AT = 256
"""Updates that a reader may be behind. More may be in the buffers of the connections."""


class Mailbox:
    """Updates of one request, in order. `next` writes all that have come since its last call into one message, because
    one message for each token would cost a fast ring a tenth of its speed.

    A mailbox holds little more than PARK_AT updates: the driver then parks the sequence until the reader has taken
    them.
    """

    def __init__(self) -> None:
        self.parked = False
        self._queue: asyncio.Queue[Write] = asyncio.Queue()
        self._flushed_at = float("-inf")

    @property
    def backlog(self) -> int:
        """The number of updates that wait for their reader."""
        return self._queue.qsize()

    def post(self, write: Write) -> None:
        self._queue.put_nowait(write)

    def take_into(self, message: pb.GenerateEvents) -> None:
        """Write the oldest update into a message. There must be one."""
        self._queue.get_nowait()(message)

    async def next(self) -> pb.GenerateEvents:
        """Return a message with all updates since the last call. Waits as long as the request lives, which the driver
        limits."""
        first = await self._queue.get()
        if (early := self._flushed_at + FLUSH_EVERY_S - time.monotonic()) > 0:
            await asyncio.sleep(early)
        message = pb.GenerateEvents()
        first(message)
        # a message with prompt log-probabilities is already as large as a message should be
        while not self._queue.empty() and not message.prompt:
            self.take_into(message)
        self._flushed_at = time.monotonic()
        return message
