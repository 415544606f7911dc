"""The handlers of the page: `GET /`, and the static files behind it."""

from __future__ import annotations

import asyncio
import gzip

from aiohttp import hdrs, web

from exo_mesh import __version__
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.routes import OPEN, Route, RouteTable
from exo_mesh.api.web.assets import PREFIX, PageAssets
from exo_mesh.api.web.members import member_urls
from exo_mesh.printable import printable

_KEEP = "public, max-age=31536000, immutable"
MAX_CONNECT_SOURCES = 128
"""Addresses of peers in one header; a browser reads 256 kB of headers, nginx 4 kB of each by default."""

_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class PageRoutes:
    """Each method answers one route. With `headless` there is no page, and `GET /` is 404."""

    def __init__(self, context: ApiContext) -> None:
        self._service = context.service
        self._headless = context.options.headless
        self._assets = PageAssets()
        self._languages = context.options.languages

    def table(self) -> RouteTable:
        """The routes. They are open: the files are the same for every node of a version, and hold no data."""
        # fmt: off
        return [
            Route("GET", ("/",), self.root, OPEN, "The page for browsers; for others what this is", errors=(404,)),
            Route("GET", ("/dashboard",), self.dashboard, OPEN, "The page", content_type="text/html", errors=(404,)),
            Route("GET", (PREFIX + "/languages",), self.languages, OPEN, "The languages of the page", errors=(404,)),
            Route("GET", (PREFIX + "/languages/{tag}",), self.language, OPEN, "The texts of one", errors=(404,)),
            Route(
                "GET", (PREFIX + "/{version}/{file:.+}",), self.file, OPEN, "A file of the page",
                content_type="application/octet-stream", errors=(404,),
            ),
        ]
        # fmt: on

    async def root(self, request: web.Request) -> web.Response:
        """GET /: the page if the client accepts HTML, else JSON: what this is, and the next thing to type."""
        if self._headless:
            return _no_page()
        if _accepts_html(request):
            return self._page()
        reply = _about(request)
        reply.headers[hdrs.VARY] = hdrs.ACCEPT
        return reply

    async def dashboard(self, request: web.Request) -> web.Response:
        """GET /dashboard: the page, whatever the client accepts."""
        return _no_page() if self._headless else self._page()

    async def languages(self, request: web.Request) -> web.Response:
        """GET /page/languages: the tags of those that the page offers, English first."""
        if self._headless:
            return _no_page()
        tags = await asyncio.to_thread(self._languages.tags)
        return json_response({"object": "list", "data": [{"id": tag, "object": "language"} for tag in tags]})

    async def language(self, request: web.Request) -> web.Response:
        """GET /page/languages/{tag}: its texts by key. What is not among them, the page shows in English."""
        tag = request.match_info["tag"]
        texts = None if self._headless else await asyncio.to_thread(self._languages.texts, tag)
        if texts is None:
            return _no_page() if self._headless else plain_error("not_found", f"the page has no language {tag}")
        return json_response(dict(texts))

    async def file(self, request: web.Request) -> web.Response:
        """GET /page/{version}/{file}: browsers keep it for ever, since its path changes with the files."""
        name = request.match_info["file"]
        known = not self._headless and request.match_info["version"] == self._assets.version
        asset = self._assets.asset(name) if known else None
        if asset is None:
            return plain_error("not_found", f"the page of this version has no file {name}")
        headers = {hdrs.CACHE_CONTROL: _KEEP, "Cross-Origin-Resource-Policy": "same-origin"}
        body = asset.body
        if asset.gzipped:
            headers[hdrs.VARY] = hdrs.ACCEPT_ENCODING
            if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
                headers[hdrs.CONTENT_ENCODING] = "gzip"
            else:
                body = gzip.decompress(body)
        charset = None if asset.content_type.startswith("font/") else "utf-8"
        return web.Response(body=body, content_type=asset.content_type, charset=charset, headers=headers)

    def _page(self) -> web.Response:
        peers = self._service.observation.state().get("view", {}).get("peers", [])
        urls = dict.fromkeys(
            url for peer in peers for url in member_urls(peer["api_url"], peer["addresses"], peer["name"])
        )
        headers = {
            **_HEADERS,
            "Content-Security-Policy": content_security_policy(list(urls)[:MAX_CONNECT_SOURCES]),
            hdrs.CACHE_CONTROL: "no-cache",
            hdrs.VARY: hdrs.ACCEPT,
        }
        return web.Response(text=self._assets.index, content_type="text/html", headers=headers)


def content_security_policy(urls: list[str]) -> str:
    """Nothing but this node's own files; calls also to the other members, at urls. No inline script or style."""
    rules = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "font-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": " ".join(["'self'", *urls]),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _accepts_html(request: web.Request) -> bool:
    """Whether the client names text/html, as browsers do; `*/*`, which curl sends, is not enough."""
    return "text/html" in request.headers.get(hdrs.ACCEPT, "").lower()


def _no_page() -> web.Response:
    return plain_error(
        "not_found",
        "this node runs headless and has no page; GET /docs shows the routes of its API",
    )


def _about(request: web.Request) -> web.Response:
    address = f"{request.scheme}://{printable(request.host)}"
    routes = sorted({resource.canonical for resource in request.app.router.resources()})
    return json_response(
        {
            "name": "exo-mesh",
            "version": __version__,
            "about": "one language model over the machines you already own; this is its OpenAI-style API",
            "next": f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' "
            '-d \'{"messages": [{"role": "user", "content": "Hello"}], "stream": true}\'',
            "openai_base_url": f"{address}/v1",
            "routes": routes,
        }
    )
