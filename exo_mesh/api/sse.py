"""Server-sent events: framing, and the response that carries them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


def data_frame(payload: Any) -> bytes:
    """One event. JSON has no raw newline, so it is one line."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def comment_frame(text: str) -> bytes:
    """A line that clients skip; it keeps proxies and read timeouts content."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


class EventStream:
    """A response of events. Each write waits until the socket has room, so a slow reader slows its own producer.

    One that takes nothing for stall_limit_s is cut off: what it asked for holds memory on every stage.
    """

    def __init__(self, request: web.Request, stall_limit_s: float) -> None:
        self._request = request
        self._stall_limit_s = stall_limit_s
        self.response = web.StreamResponse(headers=HEADERS)

    async def start(self) -> None:
        """Send status and headers; from now on errors can only be events, and the middleware finds us here."""
        self._request[STREAM] = self
        await self.response.prepare(self._request)

    async def data(self, *payloads: Any, event_id: int | None = None) -> None:
        """Send events in one write. event_id: of the last of them; a client that has it has had all before, too.
        Raises ConnectionError if the client has gone."""
        frames = [data_frame(payload) for payload in payloads]
        if event_id is not None and frames:
            frames[-1] = b"id: %d\n%s" % (event_id, frames[-1])
        await self._write(b"".join(frames))

    async def comment(self, text: str) -> None:
        await self._write(comment_frame(text))

    async def done(self) -> None:
        await self._write(DONE)

    async def _write(self, frames: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_limit_s):
                await self.response.write(frames)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from None


STREAM = web.RequestKey("stream", EventStream)
"""The stream of a request, once that has begun."""
