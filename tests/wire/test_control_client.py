"""Calls to a peer end in a MeshError, whatever becomes of the connection: a caller is never cancelled by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import psutil
import pytest

from exo_mesh.errors import TransportError
from exo_mesh.rings.hosting.calls import COMMIT, RESERVE
from exo_mesh.wire import control_client
from exo_mesh.wire.calls import PROBE_PATH
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.peer_call import StreamAnswer, answer
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto.paths_pb2 import PathProbeRequest
from tests.mesh.membership.meshes import until


async def reserve(request: pb.ReserveRequest) -> pb.ReserveReply:
    await asyncio.sleep(60)
    return pb.ReserveReply()


async def commit(request: pb.CommitRequest) -> AsyncGenerator[pb.StageStatus, None]:
    yield pb.StageStatus(loading=pb.StageLoading())
    await asyncio.sleep(60)


SILENT = [answer(RESERVE, reserve), StreamAnswer(COMMIT, commit)]
"""Of a peer that takes calls and does not answer."""


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    server = ControlServer(SILENT)
    client = ControlClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    yield client
    await client.close()
    await server.stop(0)


async def test_a_call_on_a_connection_that_is_closed_meanwhile_fails(client: ControlClient) -> None:
    """The membership closes it when the peer has died, or to try another address of it."""
    call = asyncio.create_task(client.call(RESERVE, pb.ReserveRequest()))
    await asyncio.sleep(0.2)
    await client.close()
    with pytest.raises(TransportError):
        await call
    with pytest.raises(TransportError):
        await client.call(RESERVE, pb.ReserveRequest())


async def test_a_stream_on_a_connection_that_is_closed_meanwhile_fails(client: ControlClient) -> None:
    reports = client.stream(COMMIT, pb.CommitRequest())
    assert (await anext(reports)).HasField("loading")
    following = asyncio.ensure_future(anext(reports))
    await asyncio.sleep(0.2)
    await client.close()
    with pytest.raises(TransportError):
        await following
    with pytest.raises(TransportError):
        await anext(client.stream(COMMIT, pb.CommitRequest()))


async def test_a_first_call_on_a_closed_connection_fails(client: ControlClient) -> None:
    await client.close()
    with pytest.raises(TransportError, match="closed"):
        await client.call(RESERVE, pb.ReserveRequest())
    with pytest.raises(TransportError, match="closed"):
        async with aclosing(client.stream(COMMIT, pb.CommitRequest())) as reports:
            await anext(reports)


async def test_cancelling_the_caller_stays_a_cancellation(client: ControlClient) -> None:
    call = asyncio.create_task(client.call(RESERVE, pb.ReserveRequest()))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def connections() -> set[tuple[int, int]]:
    """The open connections of this process, by their two ports."""
    tcp = psutil.Process().net_connections("tcp")
    return {(one.laddr.port, one.raddr.port) for one in tcp if one.status == psutil.CONN_ESTABLISHED}


@pytest.mark.extended
async def test_a_connection_without_calls_is_closed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [*control_client._DIAL_OPTIONS, ("grpc.client_idle_timeout_ms", 1000)]
    monkeypatch.setattr(control_client, "_DIAL_OPTIONS", quick)
    monkeypatch.setattr(control_client, "RENEW_S", 0.9)
    server = ControlServer(SILENT, peer_id="b")
    client = ControlClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    before = connections()
    for _ in range(3):
        await client.call(PROBE_PATH, PathProbeRequest())
        assert connections() - before
        await until(lambda: not connections() - before)
    await client.close()
    await server.stop(0)


async def test_quiet_reports_have_a_connection_of_their_own_that_ends_with_the_client(client: ControlClient) -> None:
    before = connections()
    reports = client.stream(COMMIT, pb.CommitRequest(), quiet=True)
    assert (await anext(reports)).HasField("loading")
    assert not client.is_idle
    only_quiet = connections() - before
    loud = client.stream(COMMIT, pb.CommitRequest())
    assert (await anext(loud)).HasField("loading")
    assert len(connections() - before) == 2 * len(only_quiet)
    following = asyncio.ensure_future(anext(reports))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(TransportError):
        await following


async def test_the_connection_of_quiet_reports_ends_with_them(client: ControlClient) -> None:
    before = connections()
    for _ in range(3):
        async with aclosing(client.stream(COMMIT, pb.CommitRequest(), quiet=True)) as reports:
            assert (await anext(reports)).HasField("loading")
            assert connections() - before
        assert client.is_idle and not client._quiet_channels
        await until(lambda: not connections() - before)
    await client.close()
    with pytest.raises(TransportError, match="is closed"):
        await anext(client.stream(COMMIT, pb.CommitRequest(), quiet=True))
    assert not client._quiet_channels


async def test_a_call_after_a_pause_leaves_running_calls_alone(
    client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "RENEW_S", 0.0)
    first = client.stream(COMMIT, pb.CommitRequest())
    assert (await anext(first)).HasField("loading")
    channel = client._channel
    second = client.stream(COMMIT, pb.CommitRequest())
    assert (await anext(second)).HasField("loading")
    assert client._channel is channel, "a call runs on it"
    for stream in (first, second):
        following = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert client.is_idle
    third = client.stream(COMMIT, pb.CommitRequest())
    assert (await anext(third)).HasField("loading")
    assert client._channel is not channel
