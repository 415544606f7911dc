"""Handlers for the OpenAPI document and for the page that shows it."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

from exo_mesh.api.errors import json_response
from exo_mesh.api.openapi import openapi_document
from exo_mesh.api.routes import OPEN, ROUTES, Route, RouteTable

_CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


class DocumentRoutes:
    """Each method answers one route."""

    def table(self) -> RouteTable:
        """The routes. They are open: the document is the same for every node of a version."""
        return [
            Route("GET", ("/api/openapi.json", "/openapi.json"), self.document, OPEN, "This document: OpenAPI 3.1"),
            Route("GET", ("/docs",), self.page, OPEN, "A page that shows the document", content_type="text/html"),
        ]

    async def document(self, request: web.Request) -> web.Response:
        """GET /api/openapi.json"""
        table: RouteTable = request.app[ROUTES]
        return json_response(openapi_document(table))

    async def page(self, request: web.Request) -> web.Response:
        """GET /docs: a static page that reads the document from this node."""
        text = files("exo_mesh.api").joinpath("docs.html").read_text("utf-8")
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": _CSP})
