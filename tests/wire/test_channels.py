"""Which way a channel takes to a peer, whatever the machine uses for the web."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from exo_mesh.wire.channels import bind, new_server, open_channel
from tests.cli.closed_port import closed_port

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def peer() -> AsyncIterator[str]:
    """The address of somebody who knows no method at all, and says so."""
    server = new_server()
    port = bind(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def what_comes_of_a_call(target: str) -> grpc.StatusCode:
    async with open_channel(target) as channel:
        try:
            await channel.unary_unary("/no.Such/Method")(b"", timeout=10)  # type: ignore[misc]
        except grpc.aio.AioRpcError as exc:
            return exc.code()
    raise AssertionError("it answered")


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy"])
async def test_the_proxy_for_the_web_is_not_in_the_way_to_a_peer(
    peer: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"http://127.0.0.1:{closed_port()}")
    assert await what_comes_of_a_call(peer) is grpc.StatusCode.UNIMPLEMENTED


async def test_the_proxy_for_grpc_is_used(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert await what_comes_of_a_call(peer) is grpc.StatusCode.UNAVAILABLE
    assert asked[0] == f"CONNECT {peer} HTTP/1.1\r\n".encode()
