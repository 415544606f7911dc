"""Carries messages from the driver to the call that waits for tokens."""

from __future__ import annotations

import asyncio
import time

from exo_mesh.proto import driver_pb2 as pb

FLUSH_EVERY_S = 0.005
"""Tokens that come within this time share a message: one message per token would cost more than a fast lap of the ring.
A token that comes later than this after the last message is sent at once."""

PARK_AT = 256
"""Messages that a reader may be behind. More messages may be in the buffers of the connections."""


class Mailbox:
    """Messages of one request, in order.

    A mailbox holds little more than PARK_AT messages: the driver then parks the sequence until the reader has taken
    them.
    """

    def __init__(self) -> None:
        self.parked = False
        self._queue: asyncio.Queue[pb.GenerateEvents] = asyncio.Queue()
        self._flushed_at = float("-inf")

    @property
    def backlog(self) -> int:
        """The number of messages that wait for their reader."""
        return self._queue.qsize()

    def post(self, message: pb.GenerateEvents) -> None:
        self._queue.put_nowait(message)

    async def next(self) -> pb.GenerateEvents:
        """All messages since the last call, merged into one; waits as long as the request lives, which the driver
        limits."""
        merged = await self._queue.get()
        if (early := self._flushed_at + FLUSH_EVERY_S - time.monotonic()) > 0:
            await asyncio.sleep(early)
        # a message with prompt log-probabilities is already as large as a message should be
        while not self._queue.empty() and not merged.prompt:
            merged.MergeFrom(self._queue.get_nowait())
        self._flushed_at = time.monotonic()
        return merged
