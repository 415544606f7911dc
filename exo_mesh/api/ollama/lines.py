"""Ollama's forms of streams and errors: lines of JSON, and an object with one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from exo_mesh.api.core.failure import Failure
from exo_mesh.api.errors import ErrorForm
from exo_mesh.api.routes import NDJSON
from exo_mesh.api.sse import HEADERS, StreamForm

if TYPE_CHECKING:
    from exo_mesh.api.ollama.objects import OllamaError

PREFIXES = ("/api/", "/ollama/")
"""Beginnings of the paths of this dialect, also of its unknown routes."""


def line_frame(payload: Any) -> bytes:
    """Encode one line of JSON."""
    return msgspec.json.encode(payload) + b"\n"


LINES = StreamForm({**HEADERS, "Content-Type": NDJSON}, lambda failure: line_frame(_body(failure)))
"""Lines of JSON; an error is the last line."""


def _speaks(request: web.Request) -> bool:
    return request.path.startswith(PREFIXES)


def _body(failure: Failure, request_id: str = "") -> OllamaError:
    from exo_mesh.api.ollama.objects import OllamaError  # not before the first error

    return OllamaError(failure.message)


OLLAMA_ERRORS = ErrorForm(_speaks, _body)
"""The errors of all paths of this dialect."""
