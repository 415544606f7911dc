"""A second address of a machine: a relay on another loopback address, which can be slow and can be unplugged."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SECOND = "127.0.0.2"


def has_second_loopback() -> bool:
    """Linux answers at all of 127/8; other systems only where an alias has been set up."""
    try:
        with socket.create_server((SECOND, 0)):
            return True
    except OSError:
        return False


class Relay:
    """Passes everything on between SECOND:port and 127.0.0.1:port, each piece after delay_s."""

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.port = port
        self.delay_s = delay_s
        self.accepted = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._frozen: set[asyncio.StreamWriter] = set()

    @property
    def open_connections(self) -> int:
        return len(self._writers) // 2

    def freeze(self) -> None:
        """Nothing passes any more on the connections there are, and nobody is told; new ones work."""
        self._frozen |= self._writers

    def cut(self) -> None:
        """End the connections there are; new ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()

    def unplug(self) -> None:
        """From now on nobody answers at this address."""
        if self._server is not None:
            self._server.close()
        self.cut()

    @asynccontextmanager
    async def plugged_in(self) -> AsyncIterator[Relay]:
        self._server = await asyncio.start_server(self._accept, SECOND, self.port)
        try:
            yield self
        finally:
            self.unplug()
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, up_writer}
        self._writers |= both
        try:
            await asyncio.gather(self._pass(reader, up_writer), self._pass(up_reader, writer))
        finally:
            self._writers -= both
            self._frozen -= both
            for one in both:
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if writer in self._frozen:
                    continue
                writer.write(piece)
                await writer.drain()
        if writer not in self._frozen:
            writer.close()
