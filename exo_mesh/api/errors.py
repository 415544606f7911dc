"""Translates errors to HTTP: the status of each error code, and the body in the caller's dialect. No other module
decides these."""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from exo_mesh.api.core.failure import Failure
from exo_mesh.api.routes import ROUTES, near_path
from exo_mesh.api.sse import STREAM
from exo_mesh.base import printable
from exo_mesh.errors import FetchError, InputError, MeshError, OverloadError, PlacementError

log = logging.getLogger(__name__)


class _Rule(msgspec.Struct, frozen=True):
    status: int
    kind: str
    retry_after_s: int | None = None


_CALLER = "invalid_request_error"
_SERVER = "server_error"
_RULES: dict[str, _Rule] = {
    "invalid_request": _Rule(400, _CALLER),
    "context_length_exceeded": _Rule(400, _CALLER),
    "model_unusable": _Rule(400, _CALLER),
    "invalid_api_key": _Rule(401, _CALLER),
    "insufficient_permissions": _Rule(403, "permission_error"),
    "open_mesh": _Rule(403, "permission_error"),
    "cross_site_refused": _Rule(403, "permission_error"),
    "wrong_code": _Rule(403, "permission_error"),
    "no_invitation": _Rule(404, _CALLER),
    "model_not_found": _Rule(404, _CALLER),
    "no_instance": _Rule(404, _CALLER),
    "not_found": _Rule(404, _CALLER),
    "response_not_found": _Rule(404, _CALLER),
    "method_not_allowed": _Rule(405, _CALLER),
    "request_timeout": _Rule(408, _CALLER),
    "stop_pending": _Rule(409, "conflict_error"),
    "superseded": _Rule(409, "conflict_error"),
    "instance_deleted": _Rule(410, "conflict_error"),
    "request_too_large": _Rule(413, _CALLER),
    "misdirected_request": _Rule(421, _CALLER),
    "idempotency_key_reused": _Rule(422, _CALLER),
    "overloaded": _Rule(429, "rate_limit_error", 1),
    "cancelled": _Rule(499, "cancelled_error"),
    "internal_error": _Rule(500, _SERVER),
    "not_implemented": _Rule(501, _SERVER),
    "engine_error": _Rule(500, _SERVER),
    "bodies_wait": _Rule(503, _SERVER, 5),
    "canary_failed": _Rule(503, _SERVER, 10),
    "fetch_failed": _Rule(503, _SERVER, 10),
    "no_store": _Rule(503, _SERVER),
    "web_tools_off": _Rule(503, _SERVER),
    "no_placement": _Rule(400, _CALLER),
    "pending": _Rule(503, _SERVER, 5),
    "memory_pressure": _Rule(503, _SERVER, 10),
    "crash_loop": _Rule(503, _SERVER, 60),
    "quarantined": _Rule(503, _SERVER, 600),
    "reservation_refused": _Rule(503, _SERVER, 2),
    "rank_lost": _Rule(503, _SERVER, 2),
    "stage_lost": _Rule(503, _SERVER, 1),
    "peer_version": _Rule(503, _SERVER, 10),
    "transport_error": _Rule(503, _SERVER, 1),
    "not_ready": _Rule(503, _SERVER, 2),
    "node_stopping": _Rule(503, _SERVER, 1),
    "deadline_exceeded": _Rule(504, _SERVER),
}
FAILURE = web.ResponseKey("failure", Failure)
"""What an error reply reports; the middleware writes it in the dialect of the caller."""

REASONS = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A reply with a JSON body, encoded directly to bytes."""
    body = msgspec.json.encode(value)
    return web.Response(
        body=body, status=status, reason=REASONS.get(status), headers=headers, content_type="application/json"
    )


class ErrorForm(msgspec.Struct, frozen=True):
    """The errors of one dialect. speaks: whether a request expects them. body: the JSON body of an error; it also gets
    the id of the request."""

    speaks: Callable[[web.Request], bool]
    body: Callable[[Failure, str], Any]


def error_response(error: MeshError) -> web.Response:
    """The HTTP reply for an error."""
    rule = _RULES.get(error.code, _RULES["internal_error"])
    wait_s = math.ceil(error.retry_after_s) if isinstance(error, OverloadError) else rule.retry_after_s
    if isinstance(error, FetchError) and error.is_final:
        wait_s = None  # a retry cannot succeed, so do not suggest one
    text = error.full if isinstance(error, FetchError) else str(error)
    details = error.details if isinstance(error, PlacementError | InputError) else None
    if isinstance(error, FetchError):
        details = {"remedy": error.remedy, "is_final": error.is_final}
    headers = {"Retry-After": str(max(1, wait_s))} if wait_s else None
    return _reply(_failure(error.code, text, getattr(error, "param", None), details), headers)


def plain_error(code: str, message: str, param: str | None = None) -> web.Response:
    """The reply for an error that is not a MeshError, such as an unknown path."""
    return _reply(_failure(code, message, param))


def _failure(code: str, message: str, param: str | None, details: Mapping[str, Any] | None = None) -> Failure:
    rule = _RULES.get(code, _RULES["internal_error"])
    # the message may quote a caller's text, and a lone surrogate in it cannot be encoded
    text = message.encode("utf-8", "replace").decode()
    return Failure(rule.status, code, rule.kind, text, param, details)


def _reply(failure: Failure, headers: dict[str, str] | None = None) -> web.Response:
    """The reply for a failure in OpenAI's form."""
    reply = json_response(failure.openai_body(), failure.status, headers)
    reply[FAILURE] = failure
    return reply


def errors_to_replies(forms: Sequence[ErrorForm], id_of: Callable[[web.Request], str]) -> Middleware:
    """The middleware that turns every failure of a handler into a reply, in the first of the forms that the request
    expects, else in OpenAI's form. id_of: the id of a request.

    This is the boundary of the API: any exception other than a MeshError is a bug of exo-mesh. Only its type and place
    are logged, because its message might quote a prompt.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            reply = await _tried(request, handler)
            if FAILURE not in reply:
                return reply
            if STREAM in request:
                await request[STREAM].send(request[STREAM].form.error_frame(reply[FAILURE]))
                return request[STREAM].response
            form = next((form for form in forms if form.speaks(request)), None)
            if form is not None:
                assert isinstance(reply, web.Response)
                reply.body = msgspec.json.encode(form.body(reply[FAILURE], id_of(request)))
            return reply
        finally:
            if STREAM in request:
                request[STREAM].close()

    return middleware


async def _tried(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The reply of the handler, or the reply for its error."""
    try:
        return await handler(request)
    except MeshError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionError:
        raise  # the client has gone; aiohttp closes the connection
    except Exception as error:  # noqa: BLE001  a boundary: a bug must become a 500, not a dropped connection
        places = "".join(traceback.format_tb(error.__traceback__))
        log.error("%s %s failed with %s at\n%s", request.method, request.path, type(error).__name__, places)
        return plain_error("internal_error", f"internal error ({type(error).__name__}); see the node's log")


_BATCHES = re.compile(r"/v1/(messages/)?batches(/.*)?|/v1/files(/.*)?")
"""Routes of other servers for files of requests."""


def _no_route(request: web.Request) -> str:
    text = f"no route {request.method} {request.path}; "
    if near := near_path(request.app[ROUTES], request.method, request.path):
        return f"{text}did you mean {near}?"
    if _BATCHES.fullmatch(request.path):
        return text + "`exo-mesh batch FILE` runs the requests of a file in OpenAI's batch format"
    return text + "GET / lists the routes"


def _http_error(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    code = _HTTP_CODES.get(error.status)
    if code is None:
        if error.status < 400:
            return web.Response(status=error.status, headers=error.headers)
        code = "invalid_request" if error.status < 500 else "internal_error"
    messages = {
        404: _no_route(request),
        405: f"{request.path} does not support {request.method}",
        408: "the rest of the request body did not arrive in time",
        413: f"the request body is larger than {request.client_max_size} bytes",
    }
    reply = plain_error(code, messages.get(error.status, error.reason))
    if "Allow" in error.headers:
        reply.headers["Allow"] = error.headers["Allow"]
    return reply


MAX_QUOTED_CHARS = 80


def quoted(text: str) -> str:
    """A client's text as a JSON string: at most MAX_QUOTED_CHARS of it, with unprintable characters escaped."""
    is_short = len(text) <= MAX_QUOTED_CHARS
    return printable.quoted(text if is_short else text[: MAX_QUOTED_CHARS - 1] + "…")
