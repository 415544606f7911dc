"""Handlers for the OpenAPI document and for the page that shows it."""

from __future__ import annotations

import asyncio
from importlib.resources import files

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response
from exo_mesh.api.openapi import openapi_document
from exo_mesh.api.routes import ROUTES, RouteTable

_CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


class DocumentRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        """Needs nothing of the context."""

    async def document(self, request: web.Request) -> web.Response:
        """GET /api/openapi.json"""
        table: RouteTable = request.app[ROUTES]
        return json_response(await asyncio.to_thread(openapi_document, table))

    async def page(self, request: web.Request) -> web.Response:
        """GET /docs: a static page that reads the document from this node."""
        text = files("exo_mesh.api").joinpath("docs.html").read_text("utf-8")
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": _CSP})
