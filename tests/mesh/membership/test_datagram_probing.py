"""Memberships on the loopback that probe by datagrams: while nothing is new, never on their word alone, and without
harm where datagrams do not arrive."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from msgspec.structs import replace

from exo_mesh.domain.device import Telemetry
from exo_mesh.domain.plan import StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.messages import ProbeRequest
from exo_mesh.mesh.membership.swim import SwimState
from exo_mesh.security.probe_seal import ProbeSeal
from exo_mesh.wire.calls import PROBE_PATH
from exo_mesh.wire.probes.messages import ProbeAnswer, ProbeQuestion, decode, encode_question, new_token
from exo_mesh.wire.probes.port import Answerer, ProbePort
from exo_mesh.wire.probes.udp_socket import Address
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto.paths_pb2 import PathProbeRequest
from exo_mesh.wire.readings import Reading
from tests.mesh.membership.meshes import Peer, mesh, peer_info, until
from tests.mesh.membership.test_service import an_instance

KEY = b"k" * 32


class CountingPort(ProbePort):
    """A port that counts the probes it answered. loss: the share of datagrams that it does not send; as many are sent
    twice, or later than the next one."""

    def __init__(self, peer: Peer, key: bytes | None, loss: float) -> None:
        super().__init__(ProbeSeal(key), peer.membership.own.incarnation)
        self.num_answered = 0
        self._loss = loss
        self._rng = random.Random(4)
        self._held: list[tuple[bytes, Address]] = []

    async def start(self, host: str, port: int, answer: Answerer) -> bool:
        def counted(request: pb.ProbeRequest, host: str) -> tuple[pb.ProbeReply | None, bool]:
            reply, is_known = answer(request, host)
            self.num_answered += reply is not None
            return reply, is_known

        return await super().start(host, port, counted)

    def _send(self, payload: bytes, to: Address) -> None:
        drawn = self._rng.random()
        if drawn < self._loss:
            return
        if drawn < 2 * self._loss:
            self._held.append((payload, to))
            return
        super()._send(payload, to)
        if drawn < 3 * self._loss:
            super()._send(payload, to)
        while self._held:
            super()._send(*self._held.pop())


@asynccontextmanager
async def pair(*, loss: float = 0.0, keys: tuple[bytes | None, bytes | None] = (KEY, KEY)) -> AsyncIterator[list[Peer]]:
    """Peers a and b that know each other and probe by datagrams."""

    def with_port(peer: Peer) -> None:
        peer.probe_port = CountingPort(peer, keys["ab".index(peer.membership.own.id)], loss)

    async with mesh("a", "b", before_start=with_port) as peers:
        yield peers


def num_answered(peers: list[Peer]) -> list[int]:
    return [peer.probe_port.num_answered for peer in peers if isinstance(peer.probe_port, CountingPort)]


def suspects(peers: list[Peer]) -> list[str]:
    """Names of peers that one of these does not consider alive."""
    held = [(other, peer.membership._roster.swim.member(other)) for peer in peers for other in "ab"]
    return [other for other, member in held if member is not None and member.state is not SwimState.ALIVE]


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "closed"])
async def test_peers_without_news_probe_by_datagrams(key: bytes | None) -> None:
    async with pair(keys=(key, key)) as peers:
        await until(lambda: min(num_answered(peers)) >= 3)
        calls = [peer.num_calls for peer in peers]
        for _ in range(100):  # rounds of ten datagrams, until the machine is quick enough for one without a call
            calls, answered = [peer.num_calls for peer in peers], num_answered(peers)
            await until(lambda answered=answered: min(num_answered(peers)) >= max(answered) + 10)
            if calls == [peer.num_calls for peer in peers]:
                return
        pytest.fail(f"no ten datagrams without a call: {calls}")


async def test_a_record_reaches_a_peer_that_is_probed_by_datagrams() -> None:
    async with pair() as peers:
        one, other = peers
        await until(lambda: min(num_answered(peers)) >= 3)
        one.membership.describe(peer_info("a", name="renamed", addresses=(one.address,)))
        await until(lambda: "renamed" in [peer.info.name for peer in other.membership.peers])


async def test_peers_that_share_a_ring_probe_each_other_by_calls() -> None:
    async with pair() as peers:
        await until(lambda: min(num_answered(peers)) >= 3)
        peers[0].membership.put_instance("i", an_instance("a"))
        await until(peers[1].membership.view.instances)
        answered, calls = num_answered(peers), [peer.num_calls for peer in peers]
        await until(lambda: min(peer.num_calls for peer in peers) >= max(calls) + 20)
        assert sum(num_answered(peers)) - sum(answered) <= 2, "those that were on their way"


async def test_peers_that_share_a_calm_ring_probe_by_datagrams_until_it_is_used() -> None:
    async with pair() as peers:
        calm = {"m-1"}
        for peer in peers:
            peer.membership.probing._is_calm = calm.__contains__
        peers[0].membership.put_instance("m-1", an_instance("a"))
        await until(peers[1].membership.view.instances)
        answered = num_answered(peers)
        await until(lambda: min(num_answered(peers)) >= max(answered) + 10)
        calm.clear()
        answered, calls = num_answered(peers), [peer.num_calls for peer in peers]
        await until(lambda: min(peer.num_calls for peer in peers) >= max(calls) + 20)
        assert sum(num_answered(peers)) - sum(answered) <= 2, "those that were on their way"


async def test_a_ring_that_is_placed_is_never_calm() -> None:
    async with pair() as peers:
        for peer in peers:
            peer.membership.probing._is_calm = lambda instance_id: True
        loading = replace(an_instance("a"), state=InstanceState.LOADING)
        peers[0].membership.put_instance("m-1", loading)
        await until(peers[1].membership.view.records_of_instances)
        assert all(peer.membership.probing._must_call(peer.membership.peers[0]) for peer in peers)


async def test_the_members_of_a_ring_are_called_as_soon_as_it_is_used() -> None:
    async with pair() as peers:
        for peer in peers:
            peer.membership.probing._is_calm = lambda instance_id: True
        peers[0].membership.put_instance("m-1", over_both())
        await until(peers[1].membership.view.instances)
        calls = peers[1].num_calls

        def checked() -> bool:  # a datagram may be on its way
            peers[0].membership.check_partners()
            return peers[1].num_calls > calls

        await until(checked)


def over_both() -> InstanceInfo:
    """A ring with a stage at each of the two peers."""
    one = an_instance("a")
    stages = (StagePlan("a", "dummy", Shard("m", 0, 2, 4), 10), StagePlan("b", "dummy", Shard("m", 2, 4, 4), 10))
    return replace(one, plan=replace(one.plan, stages=stages), endpoints=one.endpoints * 2, pids=(7, 8))


@pytest.mark.extended
async def test_peers_whose_datagrams_are_lost_doubled_and_reordered_are_never_suspected() -> None:
    async with pair(loss=0.03) as peers:
        await until(lambda: suspects(peers) or min(num_answered(peers)) >= 20, 30)
        assert not suspects(peers)
        assert not any(peer.left for peer in peers)


@pytest.mark.parametrize("why", ["all are lost", "another secret"])
async def test_peers_whose_datagrams_never_arrive_probe_by_calls(why: str) -> None:
    lost, keys = (1.0, (KEY, KEY)) if why == "all are lost" else (0.0, (KEY, b"o" * 32))
    async with pair(loss=lost, keys=keys) as peers:
        begin = [peer.num_calls for peer in peers]
        await until(lambda: suspects(peers) or min(peer.num_calls for peer in peers) >= max(begin) + 20)
        assert not suspects(peers)
        assert num_answered(peers) == [0, 0]


async def test_a_peer_that_answers_datagrams_but_no_calls_is_found_out_after_a_failed_call() -> None:
    async with pair() as peers:
        one, other = peers
        await until(lambda: min(num_answered(peers)) >= 3)
        await other.server.stop(0)
        with pytest.raises(TransportError):
            await one.membership.peers[0].client.call(PROBE_PATH, PathProbeRequest(), 1.0)
        await until(lambda: one.left == ["b"])


async def test_a_peer_whose_process_ended_is_dead() -> None:
    async with pair() as peers:
        await until(lambda: min(num_answered(peers)) >= 3)
        await peers[1].crash()
        await until(lambda: peers[0].left == ["b"])


@contextmanager
def stranger(peer: Peer) -> Iterator[socket.socket]:
    """A socket that is connected to a peer's port for probes."""
    host, _, port = peer.address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect((host, int(port)))
        sock.setblocking(False)
        yield sock


def question(caller: str = "b", target: str = "a", *, start: int = 1, caller_start: int = 1) -> bytes:
    request = pb.ProbeRequest(from_peer=caller, incarnation=caller_start, target=target)
    return encode_question(ProbeQuestion(b"%-16s" % caller.encode(), start, request))


async def test_only_a_peer_gets_an_answer_and_only_to_a_probe_of_this_start() -> None:
    async with pair() as peers:
        seal = ProbeSeal(KEY)
        with stranger(peers[0]) as sock:
            valid = question()
            sealed = seal.close(question("z"))
            refused = [
                sealed,
                sealed,
                seal.close(question(target="c")),
                seal.close(question(start=2)),
                seal.close(question(caller_start=2)),
                ProbeSeal(b"o" * 32).close(valid),
                ProbeSeal(None).close(valid),
                valid,
                b"",
                b"\xff" * 1200,
                b"\xff" * 4000,
            ]
            for datagram in (*refused, seal.close(valid)):
                sock.send(datagram)
            reply = await asyncio.get_running_loop().sock_recv(sock, 4000)
            found = decode(ProbeSeal(KEY).open(reply))
            assert isinstance(found, ProbeAnswer)
            assert found.token == b"%-16s" % b"b"
            assert len(reply) <= len(seal.close(valid))
            with pytest.raises(BlockingIOError):
                sock.recv(4000)


async def test_a_peer_does_not_answer_from_an_address_that_is_not_a_peers() -> None:
    async with pair() as peers:
        request = ProbeRequest("b", 1, "a")
        assert peers[0].membership.probing.answer_datagram(request, "10.9.9.9") == (None, False)


async def test_a_datagram_with_telemetry_of_another_peer_is_not_heard() -> None:
    async with pair(keys=(None, None)) as peers:
        request = ProbeRequest("b", 1, "a", telemetry=(Reading.of(Telemetry("a", 2**63, 1, 1, 0)),))
        assert peers[0].membership.probing.answer_datagram(request, "127.0.0.1") == (None, False)
        assert peers[0].membership.telemetry["a"].sequence < 2**63


async def test_garbage_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with pair() as peers:
        port, rng = peers[0].probe_port, random.Random(2)
        assert port is not None
        before = port.refusals.total
        with stranger(peers[0]) as sock:
            for _ in range(100):
                sock.send(rng.randbytes(rng.randrange(1500)))
        await until(lambda: port.refusals.total >= before + 100)
        assert len([line for line in caplog.messages if "probe datagram" in line]) == 1
        assert not suspects(peers)


def answer_nobody(request: pb.ProbeRequest, host: str) -> tuple[pb.ProbeReply | None, bool]:
    return None, False


async def test_a_port_that_is_taken_leaves_probes_to_calls() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = ProbePort(ProbeSeal(None), 1)
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert not await port.start("127.0.0.1", taken.getsockname()[1], answer_nobody)
        assert not port.can_ask(address)
        assert await port.ask(address, pb.ProbeRequest(), 1, 0.01) is None
        port.stop()


@pytest.mark.parametrize("address", ["name:5000", "[fe80::1]:5000", "[::1]:5000", "127.0.0.1:99999", "nonsense"])
async def test_names_and_addresses_of_another_kind_are_not_asked(address: str) -> None:
    port = ProbePort(ProbeSeal(None), 1)
    assert await port.start("127.0.0.1", 0, answer_nobody)
    assert port.can_ask("127.0.0.1:5000")
    assert not port.can_ask(address)
    port.stop()


def test_tokens_differ() -> None:
    assert new_token() != new_token()
