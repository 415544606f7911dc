"""Connections that have not sent a whole request are bounded and closed; all others are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from exo_mesh.api import connections
from exo_mesh.api.connections import ConnectionBounds
from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.request import GenerateRequest, TokenEvent
from tests.api.scripted_mesh import ScriptedMesh, Served, served

HALF_HEAD = b"POST / HTTP/1.1\r\nX: "
HALF_BODY = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
ALIVE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Client:
    """A connection to the API, of which a test says what is sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def is_alive(self) -> bool:
        """Is a request on it answered?"""
        self.writer.write(ALIVE)
        try:
            async with asyncio.timeout(10):
                head = await self.reader.readuntil(b"\r\n\r\n")
                await self.reader.readuntil(b"}")
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        return b" 200 " in head.splitlines()[0]

    async def closed(self) -> bool:
        """Wait until the server closes it."""
        try:
            async with asyncio.timeout(10):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class StoppedClock:
    """The time of the server, which passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are looked at every 10 ms."""
    monkeypatch.setattr(connections, "SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr(connections, "BURST_S", 0.02)


@asynccontextmanager
async def clients(api: Served, count: int, sent: bytes = b"") -> AsyncIterator[list[Client]]:
    """So many connections, one after another."""
    made: list[Client] = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
        writer.write(sent)
        made.append(Client(reader, writer))
    yield made
    for client in made:
        client.writer.close()


@pytest.mark.parametrize("sent", [b"", HALF_HEAD])
async def test_a_head_that_never_ends_is_given_up(quick: None, mesh: ScriptedMesh, sent: bytes) -> None:
    bounds = ConnectionBounds(head_s=0.05)
    async with served(mesh, ApiOptions(), bounds) as api, clients(api, 1, sent) as (slow,):
        assert await slow.closed()


async def test_so_is_the_head_of_a_later_request(quick: None, mesh: ScriptedMesh) -> None:
    clock, bounds = StoppedClock(), ConnectionBounds(head_s=1.0)
    async with served(mesh, ApiOptions(), bounds, clock=clock) as api, clients(api, 1) as (slow,):
        assert await slow.is_alive()
        slow.writer.write(HALF_HEAD)
        async with asyncio.timeout(10):
            while not slow.reader.at_eof():
                clock.now += 1.0
                await asyncio.sleep(0)
        assert await slow.closed()


async def test_who_waits_between_requests_or_for_an_answer_is_left_alone(quick: None, mesh: ScriptedMesh) -> None:
    go_on, clock = asyncio.Event(), StoppedClock()

    async def slowly(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        await go_on.wait()
        for event in mesh.events(mesh.text.encode_text("Hi"), request):
            yield event

    mesh.script = slowly
    bounds = ConnectionBounds(head_s=1.0, per_address=0, total=9)
    async with served(mesh, ApiOptions(), bounds, clock=clock) as api, clients(api, 1) as (idle,):
        assert await idle.is_alive()
        chats = [asyncio.create_task(api.chat()) for _ in range(8)]
        async with asyncio.timeout(10):
            while len(mesh.running) < 8:
                await asyncio.sleep(0)
        async with clients(api, 1, HALF_HEAD) as (slow,):
            async with asyncio.timeout(10):
                while not slow.reader.at_eof():  # whenever its head arrives, the time for it passes then
                    clock.now += 1.0
                    await asyncio.sleep(0)
        go_on.set()
        assert [status for status, _ in await asyncio.gather(*chats)] == [200] * 8
        assert await idle.is_alive()


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, HALF_BODY, ALIVE])
async def test_beyond_the_total_the_oldest_is_closed(mesh: ScriptedMesh, sent: bytes) -> None:
    async with served(mesh, ApiOptions(), ConnectionBounds(total=8)) as api, clients(api, 20, sent) as many:
        async with clients(api, 1) as (late,):
            assert await late.is_alive()
        async with asyncio.timeout(10):
            while sum(client.reader.at_eof() for client in many) < 12:
                for client in many:
                    if client.reader._buffer:
                        await client.reader.read(4096)
                await asyncio.sleep(0)
        assert not many[-1].reader.at_eof()


async def test_one_address_may_not_have_all_of_them(quick: None, mesh: ScriptedMesh) -> None:
    bounds = ConnectionBounds(per_address=3)
    async with served(mesh, ApiOptions(), bounds) as api, clients(api, 8, HALF_HEAD) as many:
        assert [await client.closed() for client in many[:5]] == [True] * 5
        many[-1].writer.write(b"1\r\nHost: localhost\r\n\r\n")
        assert b" 405 " in await many[-1].reader.readuntil(b"\r\n")


async def test_a_burst_of_connections_from_one_address_is_served(mesh: ScriptedMesh) -> None:
    bounds = ConnectionBounds(per_address=3)
    async with served(mesh, ApiOptions(), bounds) as api, clients(api, 40) as many:
        assert all(await asyncio.gather(*(client.is_alive() for client in many)))


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, HALF_BODY, ALIVE])
async def test_a_server_that_stops_waits_for_no_half_a_request(mesh: ScriptedMesh, sent: bytes) -> None:
    async with asyncio.timeout(10):
        async with served(mesh, ApiOptions()) as api, clients(api, 3, sent) as many, clients(api, 1) as (late,):
            assert await late.is_alive()
        for client in many:
            if sent == ALIVE:
                await client.reader.readuntil(b"}")
            assert await client.closed()


def test_half_of_the_open_files_are_for_other_things() -> None:
    assert ConnectionBounds.within(256).total == 128
    assert ConnectionBounds.within(65_536).total == connections.MAX_WAITING
    assert ConnectionBounds.within(65_536, tls=True).total == connections.MAX_WAITING_TLS
