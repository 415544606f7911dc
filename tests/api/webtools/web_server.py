"""A small web server on loopback, and a resolver that is written here, for tests of the web tools."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

PAGE = """<!doctype html><html><head><title> A   mesh &amp; more </title><style>p {}</style></head>
<body><nav><a href="/">Home</a></nav><h1>Rings</h1><p>One peer   sends to the next.</p>
<script>steal()</script><ul><li>first<li>second</ul><footer>imprint</footer></body></html>"""


@dataclass
class WebServer:
    """port: where it listens. calls: the paths that were asked for, with the Host header."""

    port: int
    calls: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


async def _answer(server: WebServer, request: web.Request) -> web.Response:
    server.calls.append((request.path, request.headers["Host"]))
    server.headers.append(dict(request.headers))
    server.bodies.append(await request.read())
    if request.path.startswith("/hops/"):
        left = int(request.path.rpartition("/")[2])
        return web.Response(status=302, headers={"Location": f"/hops/{left - 1}" if left else "/page"})
    if request.path == "/to":
        return web.Response(status=307, headers={"Location": request.query["url"]})
    if request.path == "/large":
        return web.Response(body=b"a" * 1_500_000, content_type="text/plain")
    if request.path == "/bomb":
        packed = gzip.compress(bytes(50_000_000))
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "text/plain"})
    if request.path == "/pdf":
        return web.Response(body=b"%PDF", content_type="application/pdf")
    if request.path == "/latin":
        return web.Response(body="<p>gr\xfc\xdfe</p>".encode("latin-1"), headers={"Content-Type": "text/html"})
    if request.path == "/gone":
        return web.Response(status=404, text="<title>Gone</title>", content_type="text/html")
    if request.path in ("/search", "/web/search"):
        row = {"url": "https://a.example/x", "title": "A <b>mesh</b>", "content": "c", "description": "d &amp; e"}
        rows = [
            row,
            {"url": "javascript:alert(1)"},
            {**row, "url": "http://b.example"},
            {**row, "url": "http://c.example"},
        ]
        return web.json_response({"results": rows, "web": {"results": rows}})
    return web.Response(text=PAGE, content_type="text/html")


@asynccontextmanager
async def web_server() -> AsyncIterator[WebServer]:
    server = WebServer(0)

    async def answer(request: web.Request) -> web.Response:
        return await _answer(server, request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()


@dataclass
class Names:
    """A resolver: each name with the addresses of its first, second, … lookup; the last ones stay."""

    answers: dict[str, list[list[str]]]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        given = self.answers.get(host, [[host]])
        return given.pop(0) if len(given) > 1 else given[0]
