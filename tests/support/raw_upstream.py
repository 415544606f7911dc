"""A server that notes what it is asked and then does one thing, however wrong: what a proxy may meet in a node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

ERROR = b'{"error": {"message": "said by the node", "type": "x", "param": null, "code": "said_by_the_node"}}'


@dataclass
class RawUpstream:
    """does: "answers", "waits" between two chunks until `release` is set, "closes" after it has the request, is "half"
    done when it closes, or a status of an error."""

    does: str = "answers"
    address: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """(request line, headers with names in lower case), but for health checks."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    server: asyncio.Server = field(init=False)

    def headers(self, name: str) -> list[str | None]:
        """The value of a header in each request; None where it was not sent."""
        return [headers.get(name) for _, headers in self.asked]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        await reader.readexactly(int(headers.get("content-length", 0)))
        does = self.does
        if " /readyz " in head[0]:
            does = "answers"
        else:
            self.asked.append((head[0], headers))
        if does.isdigit():
            writer.write(b"HTTP/1.1 %d X\r\nRetry-After: 7\r\nContent-Type: application/json\r\n" % int(does))
            writer.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(ERROR) + ERROR)
        elif does != "closes":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n4\r\nhalf\r\n")
            if does == "waits":
                await writer.drain()
                await self.release.wait()
            writer.write(b"" if does == "half" else b"4\r\nmore\r\n0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


@asynccontextmanager
async def raw_upstreams(*does: str) -> AsyncIterator[list[RawUpstream]]:
    """Some of them, each on a port of its own."""
    made = [RawUpstream(one) for one in does]
    for one in made:
        one.server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
        one.address = f"127.0.0.1:{one.server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        for one in made:
            one.server.close()
