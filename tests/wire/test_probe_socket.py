"""The UDP socket of probe datagrams: it reads no more than its limit in a window, and knows where it can send."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import uvloop

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.security.probe_seal import SEALED, ProbeSeal
from exo_mesh.wire.probes.messages import ProbeAnswer, decode, encode_answer
from exo_mesh.wire.probes.port import ProbePort
from exo_mesh.wire.probes.udp_socket import MAX_IN_WINDOW, Address, UdpSocket, listening
from exo_mesh.wire.proto import control_pb2 as pb
from tests.mesh.membership.meshes import until

HOUR_S = 3600.0
SHORT_S = 0.001


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@contextmanager
def sender_to(port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", port))
        yield sock


async def turns(count: int) -> None:
    """Let the event loop read sockets this many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_after_its_limit_a_socket_is_not_read_until_the_window_is_over() -> None:
    heard: list[bytes] = []
    sock = await listening("127.0.0.1", 0)
    port = sock.getsockname()[1]
    udp = UdpSocket(sock, lambda data, _: heard.append(data), 100, max_in_window=5, window_s=HOUR_S)
    with sender_to(port) as sender:
        for number in range(20):
            sender.send(bytes([number]))
    await until(lambda: len(heard) == 5)
    await turns(100)
    assert [data[0] for data in heard] == [0, 1, 2, 3, 4]
    udp.close()


async def test_what_the_limit_holds_back_is_read_in_later_windows() -> None:
    heard: list[bytes] = []
    sock = await listening("127.0.0.1", 0)
    port = sock.getsockname()[1]
    udp = UdpSocket(sock, lambda data, _: heard.append(data), 100, max_in_window=5, window_s=0.01)
    with sender_to(port) as sender:
        for number in range(20):
            sender.send(bytes([number]))
    await until(lambda: len(heard) == 20)
    udp.close()
    udp.close()


async def test_of_a_long_datagram_no_more_is_read_than_shows_that_it_is_too_long() -> None:
    heard: list[bytes] = []
    sock = await listening("127.0.0.1", 0)
    port = sock.getsockname()[1]
    udp = UdpSocket(sock, lambda data, _: heard.append(data), 100)
    with sender_to(port) as sender:
        sender.send(bytes(60_000))  # in many fragments
        sender.send(b"")
    await until(lambda: len(heard) == 2)
    assert [len(data) for data in heard] == [101, 0]
    udp.close()


class FullSocket(socket.socket):
    """A socket whose queue in the kernel has no room, as on a stalled interface."""

    def sendto(self, *_: object) -> int:
        raise BlockingIOError


async def test_a_datagram_for_which_the_kernel_has_no_room_is_dropped() -> None:
    with FullSocket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        udp = UdpSocket(sock, lambda data, sender: None, 100)
        udp.send(b"x", ("127.0.0.1", 9))
        udp.close()


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("127.0.0.1", 5000, ("127.0.0.1", 5000)),
        ("169.254.3.4", 5000, ("169.254.3.4", 5000)),
        ("::1", 5000, None),
        ("name", 5000, None),
        ("127.0.0.1", 0, None),
        ("127.0.0.1", 99_999, None),
    ],
)
async def test_a_socket_of_ipv4_sends_to_addresses_of_ipv4(host: str, port: int, expected: Address | None) -> None:
    udp = UdpSocket(await listening("127.0.0.1", 0), lambda data, sender: None, 100)
    assert udp.address_of(host, port) == expected
    udp.close()


@needs_ipv6
async def test_a_socket_of_one_ipv6_address_sends_to_ipv6_and_to_link_local_addresses_with_an_interface() -> None:
    udp = UdpSocket(await listening("[::1]", 0), lambda data, sender: None, 100)
    number, name = socket.if_nameindex()[0]
    assert udp.address_of("fd00::1", 5000) == ("fd00::1", 5000, 0, 0)
    assert udp.address_of(f"fe80::1%{name}", 5000) == ("fe80::1", 5000, 0, number)
    assert udp.address_of(f"fe80::1%{number}", 5000) == ("fe80::1", 5000, 0, number)
    assert udp.address_of("fe80::1%nosuch", 5000) is None
    assert udp.address_of("fe80::1", 5000) is None
    assert udp.address_of("127.0.0.1", 5000) is None
    udp.close()


def answer_everybody(request: pb.ProbeRequest, host: str) -> tuple[pb.ProbeReply | None, bool]:
    return pb.ProbeReply(peer_id=host), True


@needs_ipv6
@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "[::]"])
async def test_a_node_on_a_wildcard_probes_and_answers_over_both_versions(wildcard: str) -> None:
    one, other = ProbePort(ProbeSeal(b"k" * 32), 1), ProbePort(ProbeSeal(b"k" * 32), 2)
    assert await one.start(wildcard, 0, answer_everybody)
    port = free_port(socket.SOCK_DGRAM)
    assert await other.start(wildcard, port, answer_everybody)
    for address, seen in ((f"127.0.0.1:{port}", "127.0.0.1"), (f"[::1]:{port}", "::1")):
        answer = await one.ask(address, pb.ProbeRequest(), 2, 5.0)
        assert answer is not None, address
        assert answer.reply == pb.ProbeReply(peer_id=seen)
    one.stop()
    other.stop()


def answer_late(peer: socket.socket) -> None:
    """Answer the question that this socket received, after its time."""
    seal = ProbeSeal(None)
    data, sender = peer.recvfrom(2000)
    time.sleep(10 * SHORT_S)  # stands for a suspended process
    peer.sendto(seal.close(encode_answer(decode(seal.open(data)).token, pb.ProbeReply())), sender)


async def ask_while_the_process_stands_still() -> ProbeAnswer | None:
    """Ask a peer that answers after the question's time is over, but before the event loop runs again."""
    asking = ProbePort(ProbeSeal(None), 1)
    assert await asking.start("127.0.0.1", 0, answer_everybody)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.settimeout(10.0)
        question = asyncio.create_task(
            asking.ask(f"127.0.0.1:{peer.getsockname()[1]}", pb.ProbeRequest(), 2, SHORT_S)
        )  # fmt: skip
        await asyncio.sleep(0)
        answer_late(peer)
    answer = await question
    asking.stop()
    return answer


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_answer_that_arrived_while_the_process_stood_still_counts(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(ask_while_the_process_stands_still()) is not None


@pytest.mark.extended
def test_ports_ask_each_other_through_floods_on_the_event_loop_of_a_node() -> None:
    async def scenario() -> int:
        one, other = ProbePort(ProbeSeal(b"k" * 32), 1), ProbePort(ProbeSeal(b"k" * 32), 2)
        port = free_port(socket.SOCK_DGRAM)
        assert await one.start("127.0.0.1", 0, answer_everybody)
        assert await other.start("127.0.0.1", port, answer_everybody)
        num_answers = 0
        with sender_to(port) as sender:
            for _ in range(10):
                for _ in range(2 * MAX_IN_WINDOW):
                    sender.send(SEALED + bytes(1000))
                while await one.ask(f"127.0.0.1:{port}", pb.ProbeRequest(), 2, 0.05) is None:
                    pass
                num_answers += 1
        assert other.refusals.total > 0
        one.stop()
        other.stop()
        return num_answers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == 10
