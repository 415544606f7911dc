"""A machine in the middle of a connection, and what it can do with what it has heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Recorder:
    """Passes everything on between clients and a port here, and keeps what the clients said, by connection, and all
    that the server answered.

    A session is a list of pieces, as they came, each with the number of bytes that the server had said before.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.port = 0
        self.sessions: list[list[tuple[int, bytes]]] = []
        self.answers = bytearray()
        self._open: set[asyncio.StreamWriter] = set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: list[tuple[int, bytes]] = []
        answered = bytearray()
        self.sessions.append(session)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)

        self._open |= {writer, up_writer}

        async def up() -> None:
            while piece := await reader.read(65536):
                session.append((len(answered), piece))
                up_writer.write(piece)
            up_writer.close()

        async def down() -> None:
            while piece := await up_reader.read(65536):
                answered.extend(piece)
                self.answers.extend(piece)
                writer.write(piece)
            writer.close()

        await asyncio.gather(up(), down(), return_exceptions=True)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Recorder]:
        """While this lasts, `port` is where clients are heard."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in self._open:
                writer.close()
            await server.wait_closed()


def said(session: list[tuple[int, bytes]]) -> bytes:
    """All that the client said in a session."""
    return b"".join(piece for _, piece in session)


async def replay(session: list[tuple[int, bytes]], port: int, *, in_step: bool) -> bytes:
    """Say it all again to a port here: at once, or each piece when as much has been answered as there was then.

    Answers what the server said until it hung up or was silent for 2 s.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = bytearray()

    async def hear(enough: int) -> None:
        async with asyncio.timeout(2.0):
            while len(heard) < enough and (piece := await reader.read(65536)):
                heard.extend(piece)

    try:
        for answered, piece in session:
            if in_step:
                await hear(answered)
            writer.write(piece)
            await writer.drain()
        await hear(2**31)
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return bytes(heard)
