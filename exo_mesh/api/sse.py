"""Streams of events: their framing, and the response that sends them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from exo_mesh.api.core.failure import Failure
from exo_mesh.base.clock import monotonic
from exo_mesh.base.tasks import Watchdog

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


def data_frame(payload: Any, event_id: int | None = None) -> bytes:
    """Encode one event. JSON has no raw newline, so it is one line. event_id: a client that received it has received
    all earlier events."""
    head = b"" if event_id is None else b"id: %d\n" % event_id
    return head + b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named_frame(name: str, payload: Any, event_id: int | None = None) -> bytes:
    """Encode one event with a name. event_id: see data_frame."""
    return b"event: " + name.encode() + b"\n" + data_frame(payload, event_id)


def comment_frame(text: str) -> bytes:
    """Encode a comment, which clients skip; it keeps proxies and clients from timing out."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


class StreamForm(msgspec.Struct, frozen=True):
    """The form of a stream in one dialect. headers: of its response. error_frame: encodes the error that ends a stream
    which has begun."""

    headers: Mapping[str, str]
    error_frame: Callable[[Failure], bytes]


EVENTS = StreamForm(HEADERS, lambda failure: data_frame(failure.openai_body()))
"""Server-sent events with OpenAI's errors; no [DONE] follows an error."""


class EventStream:
    """A response of events. Each write waits until the socket has room, so a slow reader slows only its own request.

    The watchdog disconnects a client that reads nothing for stall_limit_s, because its request holds memory on every
    stage.
    """

    def __init__(
        self, request: web.Request, stall_limit_s: float, watchdog: Watchdog, form: StreamForm = EVENTS
    ) -> None:
        self.form = form
        self._request = request
        self._stall_limit_s = stall_limit_s
        self._watchdog = watchdog
        self._writing_since: float | None = None
        self._is_stalled = False
        self.response = web.StreamResponse(headers=form.headers)

    async def start(self) -> None:
        """Send status and headers; after this, errors can only be sent as events. The error middleware finds the stream
        in the request and closes it."""
        self._request[STREAM] = self
        self._watchdog.watch(self._check)
        await self.response.prepare(self._request)

    def close(self) -> None:
        """Stop watching the stream; nothing may be written after this."""
        self._watchdog.forget(self._check)

    async def send(self, *frames: bytes) -> None:
        """Send frames in one write. Raises ConnectionError if the client has gone or has stopped reading."""
        self._writing_since = monotonic()
        try:
            await self.response.write(b"".join(frames))
        finally:
            self._writing_since = None
        if self._is_stalled:
            raise ConnectionResetError("the client stopped reading")

    def _check(self, now: float) -> float:
        if self._writing_since is None:
            return math.inf
        if now >= self._writing_since + self._stall_limit_s:
            self._is_stalled = True
            if self._request.transport is not None:
                self._request.transport.abort()
        return self._writing_since + self._stall_limit_s


STREAM = web.RequestKey("stream", EventStream)
"""The stream of a request, once the stream has begun."""
