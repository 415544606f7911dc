"""Builds the HTTP application: all routes, and the middlewares around each of them."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from exo_mesh.api.access import guard, send_cors_headers
from exo_mesh.api.anthropic.failures import ANTHROPIC_ERRORS, speaks_anthropic
from exo_mesh.api.anthropic.handlers import AnthropicRoutes
from exo_mesh.api.bodies.room import BodyRooms
from exo_mesh.api.body import BODY_ROOMS, discard_rests, refuse_expectations, release_bodies
from exo_mesh.api.compat.absent import AbsentRoutes
from exo_mesh.api.compat.model_pool import ModelPoolRoutes
from exo_mesh.api.compat.seed import SeedRoutes
from exo_mesh.api.config_routes import ConfigRoutes
from exo_mesh.api.connections import READ_BYTES, STOP_S, follow_connection
from exo_mesh.api.context import OUTPUT_BOUND, REQUEST_ID, SECRET_HEADER, STREAM_SECRET, ApiContext, ApiOptions
from exo_mesh.api.core.templates import TemplateRenderer
from exo_mesh.api.core.texts import TextModels
from exo_mesh.api.diagnostics import DiagnosticRoutes
from exo_mesh.api.document_routes import DocumentRoutes
from exo_mesh.api.download_routes import DownloadRoutes
from exo_mesh.api.embedding.embeddings import EmbeddingRoutes
from exo_mesh.api.embedding.rerank import RerankRoutes
from exo_mesh.api.embedding.vectors import Vectors
from exo_mesh.api.errors import errors_to_replies
from exo_mesh.api.joining import JoinRoutes
from exo_mesh.api.key_routes import KeyRoutes
from exo_mesh.api.model_lists import ModelListRoutes
from exo_mesh.api.model_routes import ModelRoutes
from exo_mesh.api.ollama.embedding import OllamaEmbeddingRoutes
from exo_mesh.api.ollama.generation import OllamaGenerationRoutes
from exo_mesh.api.ollama.lines import OLLAMA_ERRORS
from exo_mesh.api.ollama.models import OllamaModelRoutes
from exo_mesh.api.ollama.port import answer_as_ollama
from exo_mesh.api.openai.handlers import OpenAIRoutes
from exo_mesh.api.ops import OpsRoutes
from exo_mesh.api.peer_routes import PeerRoutes
from exo_mesh.api.prefix_routes import PrefixRoutes
from exo_mesh.api.request_log import log_requests
from exo_mesh.api.responses.handlers import ResponsesRoutes
from exo_mesh.api.routes import RouteRoles, RouteTable, add_routes
from exo_mesh.api.running_calls import RunningCalls
from exo_mesh.api.scrape_targets import ScrapeTargetRoutes
from exo_mesh.api.stopping import StopRoutes
from exo_mesh.api.streams.routes import StreamRoutes
from exo_mesh.api.text_routes import TextRoutes
from exo_mesh.api.trace_routes import TraceRoutes
from exo_mesh.api.tracing import TRACE, trace_headers
from exo_mesh.api.web.live_routes import LiveRoutes
from exo_mesh.api.web.page_routes import PageRoutes
from exo_mesh.api.webtools.handlers import WebToolRoutes
from exo_mesh.api.webtools.pdf_text import PdfRoutes
from exo_mesh.base.random_hex import random_hex
from exo_mesh.base.tasks import Watchdog
from exo_mesh.base.telemetry.logs import current_request, current_trace
from exo_mesh.node.service import Services

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

    The application owns `texts` and closes them; it makes them if none are given.
    """
    options = options or ApiOptions()
    texts = texts or TextModels(TemplateRenderer(), options.image_trail)
    watchdog = Watchdog(min(1.0, options.keep_alive_s / 4, options.stall_limit_s / 4))
    context = ApiContext(services, texts, options, watchdog, now, int(now()))
    table = route_table(context)
    check_access = guard(options.access, RouteRoles.of(table))
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
    add_routes(app, table)
    app.on_response_prepare.append(_send_common_headers)

    async def cors(request: web.Request, response: web.StreamResponse) -> None:
        send_cors_headers(options.access, request, response)

    app.on_response_prepare.append(cors)

    async def text_models(_: web.Application) -> AsyncIterator[None]:
        yield
        await running.close()
        app[BODY_ROOMS].close()
        await texts.close()

    app.cleanup_ctx.append(text_models)
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


def route_table(context: ApiContext) -> RouteTable:
    """Every route of the API."""
    vectors = Vectors(context)
    return [
        *ModelRoutes(context).table(),
        *DownloadRoutes(context).table(),
        *ModelListRoutes(context).table(),
        *OpenAIRoutes(context).table(),
        *ResponsesRoutes(context).table(),
        *AnthropicRoutes(context).table(),
        *StreamRoutes(context).table(),
        *PrefixRoutes(context).table(),
        *OllamaGenerationRoutes(context).table(),
        *OllamaModelRoutes(context).table(),
        *EmbeddingRoutes(context, vectors).table(),
        *RerankRoutes(context, vectors).table(),
        *OllamaEmbeddingRoutes(context, vectors).table(),
        *TextRoutes(context).table(),
        *WebToolRoutes(context).table(),
        *PdfRoutes(context).table(),
        *SeedRoutes(context).table(),
        *OpsRoutes(context).table(),
        *ScrapeTargetRoutes(context).table(),
        *TraceRoutes(context).table(),
        *DiagnosticRoutes(context).table(),
        *JoinRoutes(context).table(),
        *KeyRoutes(context).table(),
        *ConfigRoutes(context).table(),
        *StopRoutes(context).table(),
        *PeerRoutes(context).table(),
        *DocumentRoutes().table(),
        *ModelPoolRoutes(context).table(),
        *AbsentRoutes().table(),
        *PageRoutes(context).table(),
        *LiveRoutes(context).table(),
    ]


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
