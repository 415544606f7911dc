"""Fetches one page of the web: checks each address before it connects, follows redirects by hand, limits size and time.

A host name is resolved once per request. The connection goes to one of the addresses that were checked, and to no
other, so a name server that changes its answer in between (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from exo_mesh import __version__
from exo_mesh.api.webtools.addresses import AddressRules
from exo_mesh.base.authorities import trusted
from exo_mesh.errors import DeadlineError, InputError, OverloadError, TransportError

MAX_BYTES = 1_000_000
"""Most bytes of a page after unpacking; the rest is not read."""
MAX_REDIRECTS = 5
MAX_FETCHES = 8
"""Fetches that run at once; further ones get a 429."""
CONNECT_S = 5.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {
    "User-Agent": f"exo-mesh/{__version__}",
    "Accept": "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.8,*/*;q=0.1",
    "Accept-Encoding": "gzip, deflate",
}
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of (host, port). Raises InputError if there are none."""


class FetchedPage(msgspec.Struct, frozen=True):
    """A page. url: where it was found, after redirects. charset: of the headers, or "". is_cut: there was more."""

    url: str
    status: int
    content_type: str
    charset: str
    body: bytes
    is_cut: bool


class WebFetcher:
    """Fetches pages that the rules allow. rules: called for each fetch. limit_s: time limit of one, redirects
    included."""

    def __init__(self, rules: Callable[[], AddressRules], resolve: Resolve, limit_s: float) -> None:
        self._rules = rules
        self._resolve = resolve
        self._limit_s = limit_s
        self._num_running = 0

    async def fetch(self, text: str) -> FetchedPage:
        """Fetch a page. Raises InputError for a URL that is refused or whose answer cannot be used, TransportError,
        DeadlineError, and OverloadError if too many fetches run."""
        if self._num_running >= MAX_FETCHES:
            raise OverloadError(f"{MAX_FETCHES} pages are being fetched already; try again later")
        self._num_running += 1
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._follow(text)
        except TimeoutError as exc:
            raise DeadlineError(f"the page did not arrive within {self._limit_s:g} s") from exc
        finally:
            self._num_running -= 1

    async def _follow(self, text: str) -> FetchedPage:
        rules = self._rules()
        url = rules.check_url(text)
        for _ in range(MAX_REDIRECTS + 1):
            assert url.raw_host is not None and url.port is not None
            addresses = await self._resolve(url.raw_host, url.port)
            rules.check_addresses(url.raw_host, url.port, addresses)
            async with _answer(url, addresses) as reply:
                where = reply.headers.get("Location")
                if reply.status not in _REDIRECTS or where is None:
                    body, is_cut = await read_limited(reply, MAX_BYTES)
                    return FetchedPage(str(url), reply.status, reply.content_type, reply.charset or "", body, is_cut)
            url = rules.check_url(_joined(url, where))
        raise InputError(f"the page redirects more than {MAX_REDIRECTS} times", param="url")


@asynccontextmanager
async def _answer(url: URL, addresses: Sequence[str]) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to GET url from one of the addresses. It is closed afterwards, with its connection."""

    def checked_socket(info: tuple[int, int, int, str, tuple[str | int, ...]]) -> socket.socket:
        if info[4][0] not in addresses:
            raise OSError("the connection would go to an address that was not checked")
        return socket.socket(info[0], info[1], info[2])

    connector = aiohttp.TCPConnector(
        ssl=await trusted(),
        resolver=PinnedResolver(addresses),
        use_dns_cache=False,
        force_close=True,
        limit=1,
        socket_factory=checked_socket,
    )
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    try:
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                timeout=timeout,
                auto_decompress=False,  # it would unpack without a limit
                trust_env=False,  # a proxy would resolve the name again
            ) as session,
            session.get(url, allow_redirects=False) as reply,
        ):
            yield reply
    except aiohttp.ClientError as exc:
        raise TransportError(f"{url.host} cannot be reached ({type(exc).__name__})") from exc
    except OSError as exc:
        if isinstance(exc, TimeoutError) and not isinstance(exc, aiohttp.ServerTimeoutError):
            raise
        raise TransportError(f"{url.host} cannot be reached ({exc.strerror or type(exc).__name__})") from exc


class PinnedResolver(AbstractResolver):
    """Resolves every name to the addresses that were checked."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Nothing to close."""


async def read_limited(reply: aiohttp.ClientResponse, most: int) -> tuple[bytes, bool]:
    """At most `most` unpacked bytes of a body, and whether there is more. Raises InputError for a body that cannot be
    unpacked."""
    encoding = reply.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", *_WINDOWS):
        raise InputError(f"the page is packed with {encoding[:32]}, which is not supported", param="url")
    unpacker = zlib.decompressobj(_WINDOWS[encoding]) if encoding in _WINDOWS else None
    parts: list[bytes] = []
    room = most + 1
    async for chunk in reply.content.iter_any():
        try:
            part = chunk[:room] if unpacker is None else unpacker.decompress(chunk, room)
        except zlib.error as exc:
            raise InputError(f"the page is not valid {encoding}", param="url") from exc
        parts.append(part)
        room -= len(part)
        if not room:
            break
    body = b"".join(parts)
    return body[:most], len(body) > most


def _joined(url: URL, where: str) -> str:
    try:
        return str(url.join(URL(where)))
    except ValueError as exc:
        raise InputError("the page redirects to something that is not a URL", param="url") from exc
