"""The root of the port of its own that clients of Ollama may have; all other paths are the same at every port."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

RUNNING = "Ollama is running"
"""What clients look for at the base URL."""


def answer_as_ollama(port: int) -> Middleware:
    """The middleware that answers GET / and HEAD / at this port of this machine as Ollama does."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/" and request.method in ("GET", "HEAD") and _port_of(request) == port:
            return web.Response(text=RUNNING)
        return await handler(request)

    return answer


def _port_of(request: web.Request) -> int | None:
    """The port of this machine that the request came to."""
    transport = request.transport
    address = None if transport is None else transport.get_extra_info("sockname")
    return address[1] if isinstance(address, tuple) else None
