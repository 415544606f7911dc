"""A log line per request: method, route, status and time; never what was in it."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from exo_mesh.clock import monotonic

_log = logging.getLogger(__name__)

_ANYBODYS = (401, 403, 404, 405)
"""Statuses that strangers can cause at any rate."""

_POLLED = frozenset({"/metrics", "/health", "/healthz", "/readyz"})
"""Routes that programs ask every few seconds: an answer that is fine is not worth a line."""


@web.middleware
async def log_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Info for what asks the mesh to do something, debug for what only looks, and for what came to the wrong door."""
    began = monotonic()
    status = 500
    try:
        response = await handler(request)
        status = response.status
        return response
    except (ConnectionError, asyncio.CancelledError):
        status = 499
        raise
    finally:
        looks = request.method in ("GET", "HEAD", "OPTIONS")
        level = logging.DEBUG if looks or status in _ANYBODYS else logging.INFO
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "(no route)"
        if not (looks and route in _POLLED and status < 400):
            _log.log(level, "%s %s: %d in %.3f s", request.method, route, status, monotonic() - began)
