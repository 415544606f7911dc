"""Calls to a peer end in a MeshError, whatever becomes of the connection: a caller is never cancelled by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from exo_mesh.errors import TransportError
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.transport.control_client import ControlClient
from exo_mesh.transport.control_server import ControlServer


class Silent:
    """A peer that takes calls and does not answer."""

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        await asyncio.sleep(60)
        return pb.ReserveReply()

    async def commit(self, request: pb.CommitRequest) -> AsyncIterator[pb.StageStatus]:
        yield pb.StageStatus(loading=pb.StageLoading())
        await asyncio.sleep(60)


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    server = ControlServer(Silent())  # type: ignore[arg-type]
    client = ControlClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    yield client
    await client.close()
    await server.stop(0)


async def test_a_call_on_a_connection_that_is_closed_meanwhile_fails(client: ControlClient) -> None:
    """The membership closes it when the peer has died, or to try another address of it."""
    call = asyncio.create_task(client.reserve(pb.ReserveRequest()))
    await asyncio.sleep(0.2)
    await client.close()
    with pytest.raises(TransportError):
        await call
    with pytest.raises(TransportError):
        await client.reserve(pb.ReserveRequest())


async def test_a_stream_on_a_connection_that_is_closed_meanwhile_fails(client: ControlClient) -> None:
    reports = client.commit(pb.CommitRequest())
    assert (await anext(reports)).HasField("loading")
    following = asyncio.ensure_future(anext(reports))
    await asyncio.sleep(0.2)
    await client.close()
    with pytest.raises(TransportError):
        await following
    with pytest.raises(TransportError):
        await anext(client.commit(pb.CommitRequest()))


async def test_cancelling_the_caller_stays_a_cancellation(client: ControlClient) -> None:
    call = asyncio.create_task(client.reserve(pb.ReserveRequest()))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
