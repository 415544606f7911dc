"""Logs and counts each request: method, route, status and time; never its content."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from exo_mesh.base.clock import monotonic
from exo_mesh.base.telemetry.families import Counters

_log = logging.getLogger(__name__)

_ANYBODYS = (401, 403, 404, 405)
"""Statuses that anybody can cause at any rate, with or without a key."""

_POLLED = frozenset({"/metrics", "/health", "/healthz", "/readyz"})
"""Routes that monitoring calls every few seconds; their successes are not logged."""


def log_requests(responses: Counters) -> Middleware:
    """The middleware. responses: counts by method, route and status; 499 if the client left before the answer."""

    @web.middleware
    async def log_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Log at info a request that changes or runs something; at debug a read, or a request that was refused or had
        no route."""
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
            # an unknown method or path must not create a new time series
            method = request.method if request.method in hdrs.METH_ALL else "other"
            responses.labels(method, "other" if resource is None else route, str(status)).inc()

    return log_request
