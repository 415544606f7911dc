"""Handlers of the web tools: search the web, look at a page, read its text.

They serve programs that run the tool calls of a model. Nothing that they fetch or search for is logged.
"""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import T, decode_body
from exo_mesh.api.errors import json_response
from exo_mesh.api.webtools.addresses import AddressRules
from exo_mesh.api.webtools.fetching import FetchedPage, WebFetcher
from exo_mesh.api.webtools.lookups import HostLookups
from exo_mesh.api.webtools.page_child import PageAnswer, PageQuestion
from exo_mesh.api.webtools.reading import PageReaders
from exo_mesh.api.webtools.searching import DDGS, DdgsSearches, FoundPage, provider_of, search_web
from exo_mesh.errors import InputError, MeshError, WebToolsOffError

MAX_QUERY_CHARS = 400
TOP_K, MOST_TOP_K = 5, 10
MAX_CHARS, LEAST_CHARS, MOST_CHARS = 12_000, 500, 50_000
_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("application/json", "application/xml", "application/javascript", "application/x-yaml", "application/yaml")


class SearchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/tools/web_search."""

    query: str
    top_k: int = TOP_K


class OpenBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/tools/open_url."""

    url: str


class ExtractBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/tools/extract_page. max_chars: most characters of the text."""

    url: str
    max_chars: int = MAX_CHARS


class SearchReply(msgspec.Struct):
    """What a search found, the best first."""

    query: str
    provider: str
    results: list[FoundPage]


class OpenReply(msgspec.Struct):
    """A page without its text. final_url: after redirects."""

    url: str
    final_url: str
    title: str
    status_code: int
    content_type: str


class ExtractReply(msgspec.Struct):
    """A page and its text. truncated: the page or its text was longer than the limits."""

    url: str
    final_url: str
    title: str
    text: str
    truncated: bool
    status_code: int


class StrangerBrowsesError(MeshError):
    """A caller without a key on an open mesh called a web tool."""

    code = "insufficient_permissions"


class WebToolRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._observation = context.services.observation
        self._options = context.options.web_tools
        self._body_silence_s = context.options.body_silence_s
        self._fetcher = WebFetcher(self._rules, HostLookups().addresses, self._options.limit_s)
        self._readers = PageReaders()
        self._searches = DdgsSearches()

    async def search(self, request: web.Request) -> web.Response:
        """POST /v1/tools/web_search"""
        body = await self._body(request, SearchBody)
        query = " ".join(body.query.split())
        if not 0 < len(query) <= MAX_QUERY_CHARS or not query.isprintable():
            raise InputError(f"query must have 1 to {MAX_QUERY_CHARS} printable characters", param="query")
        if not 1 <= body.top_k <= MOST_TOP_K:
            raise InputError(f"top_k must be between 1 and {MOST_TOP_K}", param="top_k")
        if not self._options.search:
            known = "ddgs, brave, tavily or the URL of a SearXNG"
            message = f"this node has no search service; name one with --web-search ({known})"
            raise WebToolsOffError(message)
        if self._options.search == DDGS:
            found = await self._searches.search(query, body.top_k)
        else:
            found = await search_web(self._options, query, body.top_k)
        return json_response(SearchReply(query, provider_of(self._options), found))

    async def open(self, request: web.Request) -> web.Response:
        """POST /v1/tools/open_url"""
        body = await self._body(request, OpenBody)
        page = await self._fetcher.fetch(body.url)
        title = (await self._read(page, LEAST_CHARS)).title if page.content_type in _HTML else ""
        return json_response(OpenReply(body.url, page.url, title, page.status, page.content_type))

    async def extract(self, request: web.Request) -> web.Response:
        """POST /v1/tools/extract_page"""
        body = await self._body(request, ExtractBody)
        if not LEAST_CHARS <= body.max_chars <= MOST_CHARS:
            raise InputError(f"max_chars must be between {LEAST_CHARS} and {MOST_CHARS}", param="max_chars")
        page = await self._fetcher.fetch(body.url)
        kind = page.content_type
        if kind not in _HTML and kind not in _TEXT and not kind.startswith("text/") and not kind.endswith("+json"):
            raise InputError(f"the page has the type {kind[:100]}, which has no text that can be read", param="url")
        found = await self._read(page, body.max_chars)
        is_cut = found.is_cut or page.is_cut
        return json_response(ExtractReply(body.url, page.url, found.title, found.text, is_cut, page.status))

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        """The decoded body. Raises StrangerBrowsesError for a caller without a key, and WebToolsOffError."""
        if not request[CALLER].may_browse:
            raise StrangerBrowsesError(
                f"{request.path} fetches pages from the web, which needs a key of the mesh or the local token: "
                "`exo-mesh key local` on the node's machine prints the token"
            )
        if not self._options.is_on:
            raise WebToolsOffError("the web tools are off; start this node with --web-tools")
        return await read_as(request, self._body_silence_s, partial(decode_body, kind=kind))

    async def _read(self, page: FetchedPage, max_chars: int) -> PageAnswer:
        return await self._readers.read(page.body, PageQuestion(page.content_type in _HTML, page.charset, max_chars))

    def _rules(self) -> AddressRules:
        peers = self._observation.state().view.peers
        own = {address.rpartition(":")[0].strip("[]") for peer in peers for address in peer.addresses}
        return AddressRules(self._options.ports, frozenset(own), self._options.allowed)
