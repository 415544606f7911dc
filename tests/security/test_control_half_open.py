"""Connections to the control port that make no call: each ends after a while, and their number is limited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from exo_mesh.errors import MeshError
from exo_mesh.mesh.membership.calls import HELLO
from exo_mesh.security.certificates import issue
from exo_mesh.security.secret import new_secret
from exo_mesh.wire.channel_options import CONTROL_SERVER, HANDSHAKE_S, IDLE_S, MAX_CONNECTIONS, SERVER_OPTIONS
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.peer_call import answer
from exo_mesh.wire.proto import control_pb2 as pb
from tests.security.strangers import NOW
from tests.support.nodes import until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
HALF_TLS = bytes.fromhex("1603010200010001fc0303") + b"a" * 20
Streams = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


async def hello(request: pb.HelloRequest) -> pb.HelloReply:
    return pb.HelloReply(accepted=True)


@asynccontextmanager
async def port(credentials: Any, **options: int) -> AsyncIterator[int]:
    server = ControlServer(
        [answer(HELLO, hello)], credentials, options=[(f"grpc.{name}", value) for name, value in options.items()]
    )
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


@asynccontextmanager
async def sockets(port: int, number: int, sent: bytes) -> AsyncIterator[Streams]:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    for _, writer in opened:
        writer.write(sent)
    readers = [asyncio.create_task(reader.read()) for reader, _ in opened]
    yield opened
    for task in readers:
        task.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    for _, writer in opened:
        writer.close()


def num_closed(opened: Streams) -> int:
    return sum(reader.at_eof() for reader, _ in opened)


async def is_served(port: int, credentials: Any) -> bool:
    client = ControlClient(f"127.0.0.1:{port}", credentials)
    try:
        return (await client.call(HELLO, pb.HelloRequest())).accepted
    finally:
        await client.close()


@pytest.mark.parametrize("sent", [b"", PREFACE, HALF_TLS], ids=["silent", "preface", "half-tls"])
@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
async def test_a_connection_without_a_call_ends(sent: bytes, is_closed: bool) -> None:
    own = issue(new_secret(), "alpha", ["127.0.0.1"], NOW) if is_closed else None
    async with (
        port(own, server_handshake_timeout_ms=200, max_connection_idle_ms=200) as number,
        sockets(number, 20, sent) as opened,
    ):
        assert await is_served(number, own)
        await until(lambda: num_closed(opened) == 20)
        assert await is_served(number, own)


async def test_connections_beyond_the_limit_are_closed_at_once_and_those_before_are_served() -> None:
    async with port(None, max_allowed_incoming_connections=8) as number:
        client = ControlClient(f"127.0.0.1:{number}")
        assert (await client.call(HELLO, pb.HelloRequest())).accepted
        async with sockets(number, 40, b"") as opened:
            await until(lambda: num_closed(opened) >= 40 - 8)
            assert (await client.call(HELLO, pb.HelloRequest())).accepted
        await client.close()

        async def is_served_again() -> bool:
            try:
                return await is_served(number, None)
            except MeshError:
                return False

        async with asyncio.timeout(10):
            while not await is_served_again():
                await asyncio.sleep(0.01)


def test_every_server_has_a_deadline_and_the_control_port_limits_too() -> None:
    assert dict(SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] == 1000 * HANDSHAKE_S
    assert dict(CONTROL_SERVER)["grpc.max_connection_idle_ms"] == 1000 * IDLE_S
    assert dict(CONTROL_SERVER)["grpc.max_allowed_incoming_connections"] == MAX_CONNECTIONS
