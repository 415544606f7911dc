"""Announcements of a closed mesh: whoever does not know the secret can neither make one nor use one again."""

from __future__ import annotations

import random
import socket

import pytest

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.mesh.discovery.port import Announcement
from exo_mesh.mesh.discovery.udp import UdpDiscovery, encode
from exo_mesh.mesh.discovery.udp_sockets import LOOPBACK_BROADCAST
from exo_mesh.security import datagrams
from exo_mesh.security.datagrams import MAGIC, MAX_AGE_S, MAX_NONCES, DatagramVerdict, RefusedDatagrams, Seal
from tests.mesh.discovery.test_udp import until

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


class Clock:
    def __init__(self, now: float = 1_900_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_what_is_sealed_can_be_opened_once() -> None:
    here, there = Seal(KEY), Seal(KEY)
    datagram = here.close(b"hello")
    assert there.open(datagram) == b"hello"
    assert there.open(datagram) is DatagramVerdict.REPLAYED
    assert there.open(here.close(b"hello")) == b"hello"


def test_no_bit_of_it_can_be_changed() -> None:
    datagram = Seal(KEY).close(b"hello")
    for index in range(len(datagram)):
        for bit in range(8):
            altered = bytearray(datagram)
            altered[index] ^= 1 << bit
            assert Seal(KEY).open(bytes(altered)) is DatagramVerdict.UNSIGNED


def test_another_secret_and_no_secret_are_refused() -> None:
    for datagram in (Seal(OTHER_KEY).close(b"hello"), b"hello", b"", MAGIC, encode(Announcement("n", "i", 1))):
        assert Seal(KEY).open(datagram) is DatagramVerdict.UNSIGNED
    datagram = Seal(KEY).close(b"hello")
    for length in range(len(datagram)):
        assert Seal(KEY).open(datagram[:length]) is DatagramVerdict.UNSIGNED


@pytest.mark.parametrize(
    ("later_s", "verdict"),
    [
        (0, b"hello"),
        (MAX_AGE_S, b"hello"),
        (MAX_AGE_S + 1, DatagramVerdict.STALE),
        (-MAX_AGE_S, b"hello"),
        (-MAX_AGE_S - 1, DatagramVerdict.STALE),
    ],
)
def test_it_is_good_for_half_a_minute(later_s: float, verdict: bytes | DatagramVerdict) -> None:
    clock = Clock()
    datagram = Seal(KEY, clock).close(b"hello")
    clock.now += later_s
    assert Seal(KEY, clock).open(datagram) == verdict


def test_a_datagram_from_a_fast_clock_is_remembered_for_as_long_as_it_is_good() -> None:
    sender, receiver = Clock(), Clock()
    sender.now += MAX_AGE_S
    there = Seal(KEY, receiver)
    datagram = Seal(KEY, sender).close(b"hello")
    assert there.open(datagram) == b"hello"
    for _ in range(int(2 * MAX_AGE_S)):
        there.open(Seal(KEY, receiver).close(b"more"))
        assert there.open(datagram) is DatagramVerdict.REPLAYED
        receiver.now += 1


def test_memory_stays_flat_under_floods_with_and_without_the_secret() -> None:
    clock, rng = Clock(), random.Random(1)
    here, there = Seal(KEY, clock), Seal(KEY, clock)
    for _ in range(100_000):
        assert there.open(rng.randbytes(80)) is DatagramVerdict.UNSIGNED
    assert len(there._heard) == 0
    for _ in range(MAX_NONCES + 1000):
        there.open(here.close(b""))
    assert len(there._heard) == MAX_NONCES
    clock.now += 2 * MAX_AGE_S + 1
    there.open(here.close(b""))
    assert len(there._heard) == 1


def test_refusals_are_said_once_a_minute() -> None:
    clock = Clock(0)
    refusals = RefusedDatagrams(clock)
    assert refusals.note("10.0.0.9", "why") == "refused 1 announcement, the last one from 10.0.0.9: why"
    assert [refusals.note("10.0.0.9", "why") for _ in range(99)] == [""] * 99
    clock.now += datagrams.REPORT_EVERY_S
    assert refusals.note("10.0.0.8", "why").startswith("refused 100 announcements, the last one from 10.0.0.8")
    assert refusals.total == 101


async def test_nodes_with_one_secret_find_each_other_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port(socket.SOCK_DGRAM)
    heard: dict[str, set[str]] = {name: set() for name in "abcd"}
    keys = {"a": KEY, "b": KEY, "c": OTHER_KEY, "d": None}
    nodes = []
    for control_port, name in enumerate(heard, start=7001):
        key = keys[name]
        node = UdpDiscovery(port, port, loopback_only=True, seal=Seal(key) if key else None)
        await node.start(Announcement("default", name, control_port), heard[name].add)
        nodes.append(node)
    await until(lambda: heard["a"] and heard["b"] and all(node.refusals.total for node in nodes))
    assert heard == {"a": {"127.0.0.1:7002"}, "b": {"127.0.0.1:7001"}, "c": set(), "d": set()}
    assert any("signed with a secret, and this node has none" in line for line in caplog.messages)
    for node in nodes:
        await node.stop()


async def test_a_recorded_announcement_from_elsewhere_is_not_heard_again(caplog: pytest.LogCaptureFixture) -> None:
    port, heard = free_port(socket.SOCK_DGRAM), list[str]()
    node = UdpDiscovery(port, port, loopback_only=True, seal=Seal(KEY))
    await node.start(Announcement("home", "me", 7001), heard.append)
    recorded = Seal(KEY).close(encode(Announcement("home", "friend", 7002)))
    old = Seal(KEY, Clock(1.0)).close(encode(Announcement("home", "friend", 7003)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for datagram in [recorded, *[recorded] * 20, old, recorded[:-1] + b"!", b"\xff" * 1500]:
            sock.sendto(datagram, (LOOPBACK_BROADCAST, port))
        await until(lambda: node.refusals.total >= 23)
    assert heard == ["127.0.0.1:7002"]
    assert len([line for line in caplog.messages if "refused" in line]) == 1
    await node.stop()
