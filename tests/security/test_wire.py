"""The control port of a closed mesh: recorded sessions, floods, and what the handshake counter says of them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil
import pytest

from exo_mesh.errors import StrangerError, TransportError
from exo_mesh.mesh.membership.calls import HELLO
from exo_mesh.rings.hosting.calls import COMMIT
from exo_mesh.rings.serving.calls import CANCEL
from exo_mesh.security.certificates import issue
from exo_mesh.security.secret import new_secret
from exo_mesh.wire import handshake_counter
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.handshake_counter import MAX_INSIDE, MAX_KNOCKS, PATIENCE_S, REPORT_EVERY_S, HandshakeCounter
from exo_mesh.wire.peer_call import AnyAnswer, StreamAnswer, answer
from exo_mesh.wire.proto import control_pb2 as pb
from tests.security.relay import Recorder, replay, said
from tests.security.strangers import NOW
from tests.support.nodes import until

OWN = issue(new_secret(), "alpha", ["127.0.0.1"], NOW)


class Handler:
    """Counts calls; only these two are made here."""

    def __init__(self) -> None:
        self.calls = 0

    async def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        self.calls += 1
        return pb.HelloReply(accepted=True)

    async def cancel(self, request: pb.CancelRequest) -> pb.CancelReply:
        self.calls += 1
        return pb.CancelReply(found=True)

    async def commit(self, request: pb.CommitRequest) -> AsyncGenerator[pb.StageStatus, None]:
        self.calls += 1
        for _ in range(2):
            yield pb.StageStatus(loading=pb.StageLoading())

    @property
    def answers(self) -> list[AnyAnswer]:
        return [answer(HELLO, self.hello), answer(CANCEL, self.cancel), StreamAnswer(COMMIT, self.commit)]


@asynccontextmanager
async def closed_port() -> AsyncIterator[tuple[Handler, ControlServer]]:
    handler: Any = Handler()
    server = ControlServer(handler.answers, OWN)
    await server.start("127.0.0.1", 0)
    yield handler, server
    await server.stop(0)


async def test_a_recorded_session_cannot_be_played_again() -> None:
    async with closed_port() as (handler, server):
        async with Recorder(server.port).listening() as recorder:
            client = ControlClient(f"127.0.0.1:{recorder.port}", OWN)
            assert await client.call(CANCEL, pb.CancelRequest(request_id="chatcmpl-5ecret1d"))
            await client.close()
        (session,) = recorder.sessions
        assert handler.calls == 1
        text = said(session)
        assert len(text) > 1000 and b"chatcmpl-5ecret1d" not in text and b"exo_mesh.Control" not in text
        for in_step in (False, True, False):
            await replay(session, server.port, in_step=in_step)
        assert handler.calls == 1


async def test_one_channel_in_and_another_mesh_out() -> None:
    async with closed_port() as (handler, server):
        address = f"127.0.0.1:{server.port}"
        for credentials, error in [(issue(new_secret(), "x", [], NOW), StrangerError), (None, TransportError)]:
            client = ControlClient(address, credentials)
            with pytest.raises(error):
                await client.call(HELLO, pb.HelloRequest())
            await client.close()
        own = ControlClient(address, OWN)
        moved = own.at(address)
        assert (await own.call(HELLO, pb.HelloRequest())).accepted and await moved.call(CANCEL, pb.CancelRequest())
        await own.close()
        await moved.close()
        assert handler.calls == 2


async def test_a_stream_passes_through_the_port_of_a_closed_mesh() -> None:
    async with closed_port() as (handler, server):
        client = ControlClient(f"127.0.0.1:{server.port}", OWN)
        assert len([one async for one in client.stream(COMMIT, pb.CommitRequest())]) == 2
        await client.close()
        assert handler.calls == 1 and server._handshakes._inside


@pytest.mark.extended
async def test_a_flood_of_connections_is_one_line_and_leaves_no_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_counter, "PATIENCE_S", 1.0)
    rng, process = random.Random(1), psutil.Process(os.getpid())

    async def knock(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(rng.randbytes(rng.randrange(1, 600)))
        with suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.01)
        writer.close()

    async def flood(port: int, num_batches: int) -> None:
        for _ in range(num_batches):
            await asyncio.gather(*(knock(port) for _ in range(50)))

    async with closed_port() as (handler, server):
        await flood(server.port, 10)  # pools and caches of the libraries fill up
        before = process.memory_info().rss
        await flood(server.port, 30)
        await until(lambda: process.memory_info().rss - before < 32 * 2**20)
        await until(lambda: server._handshakes.refused >= 1000)
        assert handler.calls == 0
        client = ControlClient(f"127.0.0.1:{server.port}", OWN)
        assert (await client.call(HELLO, pb.HelloRequest())).accepted
        await client.close()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_handshakes_are_counted_that_nobody_follows() -> None:
    clock = Clock()
    keeper = HandshakeCounter(clock)
    keeper.knock()
    keeper.entered("ipv4:10.0.0.2:4000")
    keeper.entered("ipv4:10.0.0.2:4000")
    clock.now += PATIENCE_S + 1
    assert keeper.report() == "" and keeper.refused == 0
    for _ in range(2):
        keeper.knock()
    assert keeper.report() == "", "they may still be shaking hands"
    clock.now += PATIENCE_S + 1
    assert keeper.report().startswith("refused 2 connections to the control port")
    keeper.knock()
    clock.now += PATIENCE_S + 1
    assert keeper.report() == "", "said a moment ago"
    clock.now += REPORT_EVERY_S
    assert keeper.report().startswith("refused 1 connection ")
    assert keeper.refused == 3


def test_the_memory_of_handshakes_is_bounded() -> None:
    keeper = HandshakeCounter(Clock())
    for index in range(100_000):
        keeper.knock()
        if index % 10 == 0:
            keeper.entered(f"ipv4:10.0.0.2:{index}")
    assert len(keeper._knocks) <= MAX_KNOCKS and len(keeper._inside) <= MAX_INSIDE
