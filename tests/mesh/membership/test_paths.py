"""Ways to a peer: measured through a relay that is slow on purpose, chosen, left when they fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.mesh.membership.paths import PathKeeper
from exo_mesh.mesh.membership.peers import MAX_ADDRESSES, Peer
from exo_mesh.wire.calls import PROBE_PATH
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer, host_of_peer
from exo_mesh.wire.proto.paths_pb2 import PathProbeRequest
from tests.mesh.membership.meshes import peer_info, until


class Relay:
    """Passes bytes on to a port, each piece `delay_s` later and at most `bytes_per_s` of them."""

    def __init__(self, port: int, delay_s: float = 0.0, bytes_per_s: float = 1e9) -> None:
        self._port = port
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for ends in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(*ends))
            self._tasks.add(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(16384):
                await asyncio.sleep(self._delay_s + len(data) / self._bytes_per_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


class Mesh:
    """As much of a membership as the keeper of paths looks at."""

    def __init__(self, *peers: Peer) -> None:
        self.peers = list(peers)

    def peer(self, peer_id: str) -> Peer | None:
        return next((peer for peer in self.peers if peer.id == peer_id), None)


@asynccontextmanager
async def server(peer_id: str) -> AsyncIterator[int]:
    """The port of a control endpoint on the loopback that answers probes as peer_id."""
    control = ControlServer([], peer_id=peer_id)
    yield await control.start("127.0.0.1", 0)
    await control.stop(0)


@asynccontextmanager
async def known_at(*addresses: str) -> AsyncIterator[Peer]:
    """Peer "b", called at the first address."""
    info = peer_info("b", addresses=addresses)
    peer = Peer(info, list(addresses), ControlClient(addresses[0]), 0.0)
    yield peer
    await peer.close()


def keeper(peer: Peer) -> PathKeeper:
    mesh: Any = Mesh(peer)
    return PathKeeper(mesh, wall_clock=lambda: 1e9, settle_s=0.0, soon_s=0.0)


async def test_the_way_with_the_short_round_trip_is_used_and_shown() -> None:
    async with server("b") as port:
        relay = await Relay(port, delay_s=0.01).start()
        async with known_at(relay.address, f"127.0.0.1:{port}") as peer:
            await keeper(peer).measure(peer)
            assert peer.client.address == f"127.0.0.1:{port}"
            slow, fast = (peer.paths[address] for address in peer.addresses)
            assert slow.rtt_ms > 20 > fast.rtt_ms > 0  # type: ignore[operator]
            assert fast.mb_per_s > slow.mb_per_s > 0  # type: ignore[operator]
            assert fast.mb_per_s_at == slow.mb_per_s_at == 1e9, "a speed has an age"
        await relay.stop()


async def test_a_wide_pipe_is_worth_a_longer_round_trip() -> None:
    async with server("b") as port:
        thin, wide = await Relay(port, 0.001, 5e5).start(), await Relay(port, 0.004).start()
        async with known_at(thin.address, wide.address) as peer:
            await keeper(peer).measure(peer)
            assert peer.paths[thin.address].mb_per_s < 0.8  # type: ignore[operator]
            assert peer.client.address == wide.address
        await asyncio.gather(thin.stop(), wide.stop())


async def test_a_way_that_is_as_good_is_not_worth_a_move() -> None:
    """By a clock that makes all measurements alike."""
    readings = itertools.count()
    async with server("b") as one, server("b") as other, known_at(f"127.0.0.1:{one}", f"127.0.0.1:{other}") as peer:
        mesh: Any = Mesh(peer)
        alike = PathKeeper(mesh, settle_s=0.0, soon_s=0.0, clock=lambda: next(readings) / 1000)
        for first in list(peer.addresses):
            peer.use(peer.client.at(first))
            await alike.measure(peer)
            assert all(path.rtt_ms == pytest.approx(1) for path in peer.paths.values())
            assert peer.client.address == first


async def test_what_runs_over_the_old_way_goes_on_after_a_move() -> None:
    async with server("b") as port:
        relay = await Relay(port, delay_s=0.05).start()
        async with known_at(relay.address, f"127.0.0.1:{port}") as peer:
            old = peer.client
            await old.call(PROBE_PATH, PathProbeRequest())
            call = asyncio.create_task(old.call(PROBE_PATH, PathProbeRequest(reply_bytes=200_000)))
            await asyncio.sleep(0.01)
            peer.use(old.at(f"127.0.0.1:{port}"))
            await peer.close_retired()
            assert peer.retired == [old], "it is in use"
            assert len((await call).payload) == 200_000
            await peer.close_retired()
            assert peer.retired == []
        await relay.stop()


async def test_when_an_address_fails_the_one_where_the_peer_itself_answers_is_next() -> None:
    async with (
        server("somebody-else") as wrong,
        server("b") as port,
        known_at("127.0.0.1:1", f"127.0.0.1:{wrong}", f"127.0.0.1:{port}") as peer,
    ):
        await peer.try_next_address()
        assert peer.client.address == f"127.0.0.1:{port}"
        await keeper(peer).measure(peer)
        assert [path.works for path in peer.paths.values()] == [False, False, True]


async def test_a_peer_that_answers_nowhere_is_left_where_it_was() -> None:
    async with server("b") as port:
        pass
    async with known_at(f"127.0.0.1:{port}", "127.0.0.1:1", "127.0.0.1:2") as peer:
        client = peer.client
        await peer.try_next_address()
        assert peer.client is client and not peer.retired


async def test_addresses_are_learned_and_bounded_and_failed_ones_make_room() -> None:
    async with server("b") as port, known_at(f"127.0.0.1:{port}", "127.0.0.1:1") as peer:
        await keeper(peer).measure(peer)
        peer.learn(f"10.0.0.{n}:1" for n in range(1, 40))
        assert len(peer.addresses) == MAX_ADDRESSES
        assert peer.addresses[0] == f"127.0.0.1:{port}" and "127.0.0.1:1" not in peer.addresses


async def test_an_address_that_fails_and_is_not_advertised_any_more_is_forgotten() -> None:
    async with server("b") as port, known_at(f"127.0.0.1:{port}", "127.0.0.1:1", "127.0.0.1:2") as peer:
        peer.info = replace(peer.info, addresses=(f"127.0.0.1:{port}", "127.0.0.1:2"))
        await keeper(peer).measure(peer)
        assert peer.addresses == [f"127.0.0.1:{port}", "127.0.0.1:2"]


async def test_an_address_that_is_learned_while_others_are_measured_is_measured_next_time() -> None:
    async with server("b") as port, known_at(f"127.0.0.1:{port}") as peer:
        measuring = asyncio.create_task(keeper(peer).measure(peer))
        await asyncio.sleep(0)  # it has begun
        peer.learn([f"localhost:{port}"])
        await measuring
        assert peer.addresses == [f"127.0.0.1:{port}", f"localhost:{port}"] and len(peer.paths) == 1
        await keeper(peer).measure(peer)
        assert len(peer.paths) == 2


@pytest.mark.extended
async def test_the_keeper_measures_a_new_peer_and_again_when_its_addresses_change() -> None:
    async with server("b") as port, known_at(f"127.0.0.1:{port}") as peer:
        task = asyncio.create_task(keeper(peer).run())
        await until(lambda: peer.paths)
        peer.learn([f"localhost:{port}"])
        await until(lambda: len(peer.paths) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pause_s(keeper: PathKeeper, peer: Peer) -> float:
    return keeper._pause_s(peer)


async def test_a_peer_is_measured_ever_more_rarely_until_something_changes() -> None:
    async with server("b") as port:
        relay = await Relay(port).start()
        async with known_at(f"127.0.0.1:{port}", relay.address) as peer:
            steady = keeper(peer)
            pauses = []
            for _ in range(8):
                await steady.measure(peer)
                pauses.append(pause_s(steady, peer))
            assert pauses == [60, 120, 240, 480, 600, 600, 600, 600]
            await relay.stop()
            await steady.measure(peer)
            assert pause_s(steady, peer) == 60, "an address has failed"


async def test_an_idle_mesh_of_any_size_measures_one_peer_every_two_minutes() -> None:
    async with known_at("127.0.0.1:1") as peer:
        for others in (9, 15):
            mesh: Any = Mesh(*[peer] * others)
            steady = PathKeeper(mesh)
            for _ in range(3):
                await steady.measure(peer)
            assert pause_s(steady, peer) == 120 * others


async def test_an_answer_to_a_probe_is_bounded() -> None:
    async with server("b") as port:
        client = ControlClient(f"127.0.0.1:{port}")
        assert len((await client.call(PROBE_PATH, PathProbeRequest(reply_bytes=2**32 - 1))).payload) == 256 * 1024
        await client.close()


def test_the_host_in_grpcs_name_of_a_caller() -> None:
    assert host_of_peer("ipv4:10.0.0.2:41234") == "10.0.0.2"
    assert host_of_peer("ipv6:%5B::1%5D:41234") == "::1"
    assert host_of_peer("ipv6:%5Bfe80::1%252%5D:41234") == "fe80::1%2"
    assert host_of_peer("unix:/tmp/x") == ""
