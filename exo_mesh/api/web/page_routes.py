"""Handlers for the web page: `GET /`, its static files and its languages."""

from __future__ import annotations

import asyncio
import gzip

from aiohttp import hdrs, web

from exo_mesh import __version__
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error, quoted
from exo_mesh.api.web.assets import PageAssets
from exo_mesh.api.web.members import member_urls
from exo_mesh.base.printable import printable

_KEEP = "public, max-age=31536000, immutable"
MAX_CONNECT_SOURCES = 128
"""Most peer addresses in one header; a browser accepts 256 kB of headers, nginx by default 4 kB."""

_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class PageRoutes:
    """Each method answers one route. With `headless` there is no page, and `GET /` answers 404."""

    def __init__(self, context: ApiContext) -> None:
        self._observation = context.services.observation
        self._headless = context.options.headless
        self._assets = PageAssets()
        self._languages = context.options.languages

    async def root(self, request: web.Request) -> web.Response:
        """GET /: the page if the client accepts HTML, else JSON with an overview and an example request."""
        if self._headless:
            return _no_page()
        if _accepts_html(request):
            return self._page()
        reply = _about(request)
        reply.headers[hdrs.VARY] = hdrs.ACCEPT
        return reply

    async def dashboard(self, request: web.Request) -> web.Response:
        """GET /dashboard: the page, whatever Accept header the client sends."""
        return _no_page() if self._headless else self._page()

    async def worker(self, request: web.Request) -> web.Response:
        """GET /service-worker.js: it must lie above all that it keeps."""
        if self._headless:
            return _no_page()
        headers = {hdrs.CACHE_CONTROL: "no-cache"}
        return web.Response(text=self._assets.worker, content_type="text/javascript", headers=headers)

    async def languages(self, request: web.Request) -> web.Response:
        """GET /page/languages: the tags of the languages that the page offers, English first."""
        if self._headless:
            return _no_page()
        tags = await asyncio.to_thread(self._languages.tags)
        return json_response({"object": "list", "data": [{"id": tag, "object": "language"} for tag in tags]})

    async def language(self, request: web.Request) -> web.Response:
        """GET /page/languages/{tag}: the texts of a language, by key. The page shows missing keys in English."""
        tag = request.match_info["tag"]
        texts = None if self._headless else await asyncio.to_thread(self._languages.texts, tag)
        if texts is None:
            return _no_page() if self._headless else plain_error("not_found", f"the page has no language {quoted(tag)}")
        reply = json_response(dict(texts))
        reply.enable_compression()
        return reply

    async def file(self, request: web.Request) -> web.Response:
        """GET /page/{version}/{file}: a static file. Browsers may cache it for ever, as its path changes with it."""
        name = request.match_info["file"]
        known = not self._headless and request.match_info["version"] == self._assets.version
        asset = self._assets.asset(name) if known else None
        if asset is None:
            return plain_error("not_found", f"this version of the page has no file {quoted(name)}")
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
        peers = self._observation.state().view.peers
        urls = dict.fromkeys(url for peer in peers for url in member_urls(peer.api_url, peer.addresses, peer.name))
        headers = {
            **_HEADERS,
            "Content-Security-Policy": content_security_policy(list(urls)[:MAX_CONNECT_SOURCES]),
            hdrs.CACHE_CONTROL: "no-cache",
            hdrs.VARY: hdrs.ACCEPT,
        }
        return web.Response(text=self._assets.index, content_type="text/html", headers=headers)


def content_security_policy(urls: list[str]) -> str:
    """The policy of the page: only this node's own files, no inline script or style, and calls to this node and to the
    other members. urls: the origins of the other members."""
    rules = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "font-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": " ".join(["'self'", *urls]),
        "manifest-src": "'self'",
        "worker-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _accepts_html(request: web.Request) -> bool:
    """Whether the client accepts text/html explicitly, as browsers do; `*/*`, which curl sends, is not enough."""
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
            "about": "runs one language model over several machines; this is its OpenAI-style API",
            "next": f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' "
            '-d \'{"messages": [{"role": "user", "content": "Hello"}], "stream": true}\'',
            "openai_base_url": f"{address}/v1",
            "routes": routes,
        }
    )
