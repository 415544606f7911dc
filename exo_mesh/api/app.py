"""Builds the HTTP application: all routes, and the middlewares around each of them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from exo_mesh.api.access import guard, send_cors_headers
from exo_mesh.api.anthropic.failures import ANTHROPIC_ERRORS, speaks_anthropic
from exo_mesh.api.bodies.room import BodyRooms
from exo_mesh.api.body import BODY_ROOMS, discard_rests, refuse_expectations, release_bodies
from exo_mesh.api.connections import READ_BYTES, STOP_S, follow_connection
from exo_mesh.api.context import OUTPUT_BOUND, REQUEST_ID, SECRET_HEADER, STREAM_SECRET, ApiContext, ApiOptions
from exo_mesh.api.errors import errors_to_replies
from exo_mesh.api.late import LateHandlers
from exo_mesh.api.ollama.lines import OLLAMA_ERRORS
from exo_mesh.api.ollama.port import answer_as_ollama
from exo_mesh.api.request_log import log_requests
from exo_mesh.api.routes import OPEN, RouteRoles, add_routes
from exo_mesh.api.running_calls import RunningCalls
from exo_mesh.api.table import CHAT, HEALTH, TABLE
from exo_mesh.api.tracing import TRACE, trace_headers
from exo_mesh.base.random_hex import random_hex
from exo_mesh.base.tasks import TaskOwner, Watchdog
from exo_mesh.base.telemetry.logs import current_request, current_trace
from exo_mesh.node.service import Services

if TYPE_CHECKING:
    from exo_mesh.api.core.texts import TextModels

_log = logging.getLogger(__name__)
_server_log = logging.getLogger("exo_mesh.api.server")


def build_app(
    services: Services,
    options: ApiOptions | None = None,
    *,
    now: Callable[[], float] = time.time,
    texts: TextModels | None = None,
) -> web.Application:
    """Build the application over the services of a node. Call this in the running loop, and run the result with
    `app_runner`.

    The application owns `texts` and closes them; it makes them at their first use if none are given.
    """
    options = options or ApiOptions()
    watchdog = Watchdog(min(1.0, options.keep_alive_s / 4, options.stall_limit_s / 4))
    context = ApiContext(services, options, watchdog, now, texts)
    check_access = guard(options.access, RouteRoles.of(row for group in TABLE for row in group.routes))
    log_request = log_requests(options.responses)
    # the first is the outermost: log_request sees the replies that errors_to_replies makes
    reply_to_errors = errors_to_replies([ANTHROPIC_ERRORS, OLLAMA_ERRORS], lambda request: request[REQUEST_ID])
    middlewares = [follow_connection, discard_rests, give_request_id, log_request, reply_to_errors, check_access]
    running = RunningCalls(options.access, services.requests.cancel)
    middlewares += [running.middleware(), release_bodies, refuse_expectations]
    if options.ollama_port is not None:
        middlewares.append(answer_as_ollama(options.ollama_port))
    app = web.Application(middlewares=middlewares, client_max_size=options.max_body_bytes)
    app[BODY_ROOMS] = BodyRooms(options.max_body_bytes)
    late = {group.handlers: LateHandlers(group.handlers, context) for group in TABLE}
    late[HEALTH].built_now()
    called = asyncio.Event()  # by a client: open routes are for health checks and the page's files
    add_routes(
        app,
        TABLE,
        lambda group, row: late[group.handlers].method(row.handler, None if row.role is OPEN else called),
    )
    app.on_response_prepare.append(_send_common_headers)

    async def cors(request: web.Request, response: web.StreamResponse) -> None:
        send_cors_headers(options.access, request, response)

    app.on_response_prepare.append(cors)

    async def parts(_: web.Application) -> AsyncIterator[None]:
        tasks = TaskOwner()
        tasks.start(late[CHAT].built_soon(called, options.warm_after_s), "import the handlers of chats")
        yield
        await tasks.close()
        await running.close()
        app[BODY_ROOMS].close()
        await context.close()

    app.cleanup_ctx.append(parts)
    return app


def app_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a handler as soon as its client disconnects, which frees an abandoned request.

    aiohttp leaves bodies packed, and what nobody has read of them: see `body`. It stops reading from a socket once it
    holds one chunk that nobody has taken.
    """
    _server_log.addFilter(_not_http)
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=STOP_S,
        logger=_server_log,
        auto_decompress=False,
        lingering_time=0,
        read_bufsize=READ_BYTES // 4,
    )


def _not_http(record: logging.LogRecord) -> bool:
    """A log filter that drops aiohttp's records about requests that are not HTTP, and logs their type at debug.

    aiohttp logs each of them with a traceback that quotes its bytes. Anybody could fill the log in this way, and the
    bytes may be part of a prompt. The sender has already got a 400.
    """
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    _log.debug("a request was not HTTP: %s", type(error).__name__)
    return False


@web.middleware
async def give_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id: the client's x-request-id if it is 1 to 128 printable ASCII characters, else a new one.
    Log lines carry the id."""
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else "req_" + random_hex(12)
    token, trace_token = current_request.set(request[REQUEST_ID]), current_trace.set("")
    try:
        return await handler(request)
    finally:
        current_request.reset(token)
        current_trace.reset(trace_token)


async def _send_common_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Content-Type-Options"] = "nosniff"  # a browser must never read JSON as a web page
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
        if speaks_anthropic(request):
            response.headers["request-id"] = request[REQUEST_ID]  # where Anthropic's clients look for it
    if OUTPUT_BOUND in request:
        response.headers["x-exo-mesh-max-tokens"] = str(request[OUTPUT_BOUND])
    if TRACE in request:
        response.headers.update(trace_headers(request[TRACE]))
    if STREAM_SECRET in request:
        response.headers[SECRET_HEADER] = request[STREAM_SECRET]
