"""The errors of Anthropic's dialect, for replies and for streams that have begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import UNSET

from exo_mesh.api.core.failure import Failure
from exo_mesh.api.errors import ErrorForm
from exo_mesh.api.sse import HEADERS, StreamForm, named_frame

if TYPE_CHECKING:
    from exo_mesh.api.anthropic.objects import AnthropicError, ErrorObject

VERSION_HEADER = "anthropic-version"
PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "overloaded_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The types by status. 503 keeps its status, which proxies know, and gets the type that Anthropic sends with 529: the
official clients retry both in the same way. 410 means that somebody deleted the instance: the request may be sent
again."""

_TYPES_BY_CODE = {"no_placement": "api_error"}
"""The types of single errors: no request is at fault if the mesh is too small."""


def error_type(status: int, code: str = "") -> str:
    """Anthropic's type of an error with this HTTP status and code."""
    given = _TYPES_BY_CODE.get(code) or _TYPES.get(status)
    return given or ("api_error" if status >= 499 else "invalid_request_error")


def speaks_anthropic(request: web.Request) -> bool:
    """Whether a request expects Anthropic's dialect: by its path, or because it names a version of Anthropic's API."""
    is_below = request.path == PATH or request.path.startswith(f"{PATH}/")
    return is_below or VERSION_HEADER in request.headers


def _error(failure: Failure) -> ErrorObject:
    from exo_mesh.api.anthropic.objects import ErrorObject  # not before the first error

    return ErrorObject(error_type(failure.status, failure.code), failure.message, failure.details or UNSET)


def _body(failure: Failure, request_id: str) -> AnthropicError:
    from exo_mesh.api.anthropic.objects import AnthropicError

    return AnthropicError(_error(failure), request_id)


def _frame(failure: Failure) -> bytes:
    return named_frame("error", {"type": "error", "error": _error(failure)})


ANTHROPIC_ERRORS = ErrorForm(speaks_anthropic, _body)
ANTHROPIC_EVENTS = StreamForm(HEADERS, _frame)
