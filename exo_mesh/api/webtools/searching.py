"""Asks a search service: a SearXNG of the operator, Brave Search, Tavily, or, without a key, search engines by ddgs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import msgspec

from exo_mesh.api.webtools.children import WebChildren
from exo_mesh.api.webtools.fetching import CONNECT_S, MAX_BYTES, read_limited
from exo_mesh.api.webtools.options import WebToolOptions
from exo_mesh.api.webtools.search_child import SearchAnswer, SearchQuestion
from exo_mesh.base.authorities import trusted
from exo_mesh.errors import DeadlineError, InputError, TransportError, WebToolsOffError

SEARCH_S = 10.0
DDGS = "ddgs"
MAX_SNIPPET_CHARS = 1000
MAX_TITLE_CHARS = 300


class FoundPage(msgspec.Struct):
    """One page that a service found."""

    title: str
    url: str
    snippet: str


class _Call(msgspec.Struct, frozen=True):
    """One call to a service. list_at: where the results are in its answer; text: the field with the snippet."""

    method: str
    url: str
    headers: dict[str, str]
    query: dict[str, str]
    body: dict[str, Any] | None
    list_at: tuple[str, ...]
    text: str


def provider_of(options: WebToolOptions) -> str:
    """The name of the configured service; "" if there is none."""
    return options.search if options.search in ("", DDGS, "brave", "tavily") else "searxng"


class DdgsSearches:
    """Searches without a key, by the library of the extra `web`, each in a process of its own."""

    def __init__(self) -> None:
        self._children = WebChildren("exo_mesh.api.webtools.search_child", "searches are running")

    async def search(self, query: str, top_k: int) -> list[FoundPage]:
        """The first results. Raises NotReadyError, TransportError, OverloadError or DeadlineError."""
        try:
            printed = await self._children.ask(msgspec.json.encode(SearchQuestion(query, top_k)), SEARCH_S)
            answer = msgspec.json.decode(printed, type=SearchAnswer)
        except TimeoutError as exc:
            raise DeadlineError(f"{DDGS} found nothing within {SEARCH_S:g} s") from exc
        except msgspec.MsgspecError as exc:
            raise TransportError(f"{DDGS} needed too much time or memory") from exc
        if answer.error == "missing":
            raise WebToolsOffError(
                f'{DDGS} is not installed here; pip install "exo-mesh[web]", or name another service'
            )
        if answer.error:
            raise TransportError(f"the search engines that {DDGS} asks gave no results ({answer.error})")
        return _pages(answer.rows, "href", "body")[:top_k]


async def search_web(options: WebToolOptions, query: str, top_k: int) -> list[FoundPage]:
    """The first results. Raises InputError, TransportError or DeadlineError; no message contains the key."""
    call = _call(options, query, top_k)
    provider = provider_of(options)
    timeout = aiohttp.ClientTimeout(total=SEARCH_S, sock_connect=CONNECT_S)
    jar, connector = aiohttp.DummyCookieJar(), aiohttp.TCPConnector(ssl=await trusted())
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=jar) as web,
            web.request(
                call.method,
                call.url,
                headers={"Accept": "application/json", "Accept-Encoding": "gzip, deflate", **call.headers},
                params=call.query,
                json=call.body,
                allow_redirects=False,  # the key must go nowhere else
            ) as reply,
        ):
            if reply.status != 200:
                raise TransportError(_refusal(provider, reply.status))
            body, _ = await read_limited(reply, MAX_BYTES)
    except TimeoutError as exc:
        raise DeadlineError(f"{provider} did not answer within {SEARCH_S:g} s") from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise TransportError(f"{provider} cannot be reached ({type(exc).__name__})") from exc
    return _results(body, call, provider)[:top_k]


def _call(options: WebToolOptions, query: str, top_k: int) -> _Call:
    """The call that the service documents."""
    key = options.search_key
    if options.search == "brave":
        address, words = f"{options.brave_url}/web/search", {"q": query, "count": str(top_k)}
        return _Call("GET", address, {"X-Subscription-Token": key}, words, None, ("web", "results"), "description")
    if options.search == "tavily":
        address, asked = f"{options.tavily_url}/search", {"query": query, "max_results": top_k}
        return _Call("POST", address, {"Authorization": f"Bearer {key}"}, {}, asked, ("results",), "content")
    address, words = f"{options.search.rstrip('/')}/search", {"q": query, "format": "json"}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return _Call("GET", address, headers, words, None, ("results",), "content")


def _refusal(provider: str, status: int) -> str:
    if provider == "searxng" and status == 403:
        return "searxng refuses answers in JSON (403); add json to search.formats in its settings.yml"
    if status in (401, 403):
        return f"{provider} refuses the key of --web-search-key-file ({status})"
    return f"{provider} answered with the status {status}"


def _results(body: bytes, call: _Call, provider: str) -> list[FoundPage]:
    try:
        found: Any = msgspec.json.decode(body)
        for name in call.list_at:
            found = found.get(name, {} if name == "web" else [])
        return _pages(found, "url", call.text)
    except (msgspec.MsgspecError, AttributeError, TypeError) as exc:
        raise InputError(f"{provider} did not answer as its API documents") from exc


def _pages(rows: Iterable[Mapping[str, Any]], url: str, text: str) -> list[FoundPage]:
    """The rows that have an address of the web. url, text: the names of these fields."""
    return [
        FoundPage(_plain(row.get("title"))[:MAX_TITLE_CHARS], row[url], _plain(row.get(text))[:MAX_SNIPPET_CHARS])
        for row in rows
        if isinstance(row.get(url), str) and row[url].startswith(("http://", "https://"))
    ]


def _plain(text: object) -> str:
    """The text without tags and entities: services mark the words that they found."""
    return " ".join(html.unescape(re.sub(r"<[^<>]{0,100}>", "", text)).split()) if isinstance(text, str) else ""
