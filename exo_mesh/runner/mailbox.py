"""From the driver to the call that waits for its tokens."""

from __future__ import annotations

import asyncio
import time

from exo_mesh.proto import driver_pb2 as pb

FLUSH_EVERY_S = 0.005
"""Tokens that come faster than this share a message: one message each would cost more than a fast lap of the ring.
A token that comes later than this after the one before is passed on at once."""

PARK_AT = 256
"""Messages that a reader may be behind. What is further on its way is in the buffers of the connections."""


class Mailbox:
    """Messages of one request, in order.

    Holds little more than PARK_AT messages: then the driver parks the sequence until the reader has taken them.
    """

    def __init__(self) -> None:
        self.parked = False
        self._queue: asyncio.Queue[pb.GenerateEvents] = asyncio.Queue()
        self._flushed_at = float("-inf")

    @property
    def backlog(self) -> int:
        """Messages that wait for their reader."""
        return self._queue.qsize()

    def post(self, message: pb.GenerateEvents) -> None:
        self._queue.put_nowait(message)

    async def next(self) -> pb.GenerateEvents:
        """All that has come since the last call, as one message; waits as long as the request lives, which the
        driver bounds."""
        merged = await self._queue.get()
        if (early := self._flushed_at + FLUSH_EVERY_S - time.monotonic()) > 0:
            await asyncio.sleep(early)
        while not self._queue.empty() and not merged.prompt:  # those are as large as a message should be
            merged.MergeFrom(self._queue.get_nowait())
        self._flushed_at = time.monotonic()
        return merged
