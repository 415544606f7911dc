"""Handlers for the live data of the page."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from exo_mesh import __version__
from exo_mesh.api.access import CALLER
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response
from exo_mesh.api.sse import EventStream, data_frame
from exo_mesh.api.web.live import LiveFeed, live_document
from exo_mesh.base.clock import monotonic
from exo_mesh.errors import OverloadError

MAX_LISTENERS = 64
"""Most concurrent streams. Each costs a write every 2 s; the document is computed once for all of them."""


class LiveRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        interval_s = context.options.live_interval_s
        self._feed = LiveFeed(lambda: live_document(context.services.observation, context.now()), interval_s, monotonic)
        self._listeners = 0

    async def snapshot(self, request: web.Request) -> web.Response:
        """GET /metrics/snapshot"""
        document = live_document(self._context.services.observation, self._context.now())
        return json_response({**self._hello(request), **document})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics/stream: `hello`, `document`, then a `patch` every 2 s, until the client disconnects. A change of
        the shared view, such as a dead peer, is sent within half a second."""
        if request.method == "HEAD":
            return web.Response(content_type="text/event-stream")
        if self._listeners >= MAX_LISTENERS:
            raise OverloadError(f"{MAX_LISTENERS} clients already read the live data of this node; close a page")
        options = self._context.options
        self._listeners += 1
        try:
            stream = EventStream(request, options.stall_limit_s, self._context.watchdog)
            await stream.start()
            await stream.send(data_frame({"type": "hello", "data": self._hello(request)}))
            seen, has_changed = 0, False
            while True:
                self._feed.refresh(has_changed=has_changed)
                if frame := self._feed.frame(seen):
                    await stream.send(frame)
                    seen = self._feed.number
                # waits before it rests: a change during the rest would be noticed only at the end of the interval
                rest = asyncio.sleep(self._feed.soonest_s)
                change = self._context.services.observation.view_change(options.live_interval_s)
                _, has_changed = await asyncio.gather(rest, change)
        finally:
            self._listeners -= 1

    def _hello(self, request: web.Request) -> dict[str, Any]:
        """The data that does not change: the version, and the rights of this caller."""
        caller = request[CALLER]
        return {
            "version": __version__,
            "interval_s": self._context.options.live_interval_s,
            "caller": {"role": str(caller.role), "key": caller.key_id, "may_download": caller.may_download},
            "mesh_is_open": self._context.options.access.is_open,
            "web_tools": self._context.options.web_tools.names if request[CALLER].may_browse else [],
        }
