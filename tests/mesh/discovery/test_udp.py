"""Announcements on the loopback: nodes of one machine find each other; garbage and strangers are ignored."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.domain.addresses import Interface, LinkKind
from exo_mesh.mesh.discovery.port import Announcement
from exo_mesh.mesh.discovery.static import StaticDiscovery
from exo_mesh.mesh.discovery.udp import MAX_DATAGRAM_BYTES, UdpDiscovery, _Listener, decode, encode
from exo_mesh.mesh.discovery.udp_sockets import GROUP_V6, LOOPBACK_BROADCAST, LOOPBACK_GROUP, Senders, targets
from exo_mesh.security.datagrams import RefusedDatagrams


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_nodes_on_one_machine_find_each_other_and_not_themselves() -> None:
    port = free_port(socket.SOCK_DGRAM)
    heard: dict[str, set[str]] = {name: set() for name in "abc"}
    nodes = []
    for control_port, name in enumerate(heard, start=7001):
        node = UdpDiscovery(port, port, loopback_only=True)
        await node.start(Announcement("default", name, control_port), heard[name].add)
        nodes.append(node)
    await until(lambda: all(len(found) == 2 for found in heard.values()))
    assert heard["a"] == {"127.0.0.1:7002", "127.0.0.1:7003"}
    for node in nodes:
        await node.stop()


async def test_other_namespaces_and_garbage_are_ignored() -> None:
    port = free_port(socket.SOCK_DGRAM)
    heard: list[str] = []
    node = UdpDiscovery(port, port, loopback_only=True)
    await node.start(Announcement("home", "me", 7001), heard.append)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        garbage = [b"", b"\xff" * 2000, b"[" * 900, b'{"mesh":"exo-mesh"}', encode(Announcement("other", "x", 7002))]
        for datagram in [*garbage, encode(Announcement("home", "friend", 7003))]:
            sock.sendto(datagram, (LOOPBACK_BROADCAST, port))
    await until(lambda: heard)
    assert heard == ["127.0.0.1:7003"]
    await node.stop()


async def test_nodes_find_each_other_where_the_loopback_knows_multicast_only() -> None:
    """As on macOS; Linux can do it too."""
    port = free_port(socket.SOCK_DGRAM)
    heard: dict[str, set[str]] = {name: set() for name in "ab"}
    nodes = [UdpDiscovery(port, port, loopback_only=True, loopback=LOOPBACK_GROUP) for _ in heard]
    for control_port, (node, name) in enumerate(zip(nodes, heard, strict=True), start=7001):
        await node.start(Announcement("default", name, control_port), heard[name].add)
    await until(lambda: all(heard.values()))
    assert heard["a"] == {"127.0.0.1:7002"}
    for node in nodes:
        await node.stop()


async def test_a_flood_of_random_datagrams_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port(socket.SOCK_DGRAM)
    heard: list[str] = []
    node = UdpDiscovery(port, port, loopback_only=True)
    await node.start(Announcement("home", "me", 7001), heard.append)
    rng = random.Random(1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for turn in range(3_000):
            sock.sendto(rng.randbytes(rng.randrange(1400)), (LOOPBACK_BROADCAST, port))
            if turn % 50 == 0:
                await asyncio.sleep(0.001)
        friend = encode(Announcement("home", "friend", 7003))

        def is_heard() -> (
            bool
        ):  # said again and again: the receive buffer may still be full of noise, and drops it then
            sock.sendto(friend, (LOOPBACK_BROADCAST, port))
            return bool(heard)

        await until(is_heard)
    assert set(heard) == {"127.0.0.1:7003"} and not [r for r in caplog.records if r.name.startswith("exo_mesh")]
    await node.stop()


def test_an_announcement_sends_nobody_to_another_machine() -> None:
    here = Announcement("home", "friend", 7003, host="::1")
    assert decode(encode(here)) == here
    for host in ("10.0.0.9", "example.org", "0.0.0.0", 7, None, ["::1"]):
        fields = {**json.loads(encode(here)), "host": host}
        assert decode(json.dumps(fields).encode()) is None


async def test_a_loopback_address_counts_only_from_this_machine() -> None:
    heard: list[str] = []
    own = Announcement("home", "me", 7001)
    for loopback_only in (False, True):
        listener = _Listener(own, heard.append, loopback_only, None, RefusedDatagrams())
        datagram = encode(Announcement("home", "friend", 7003, host="::1"))
        listener.datagram_received(datagram, ("10.0.0.9", 5678))
        assert heard == []
        listener.datagram_received(datagram, ("127.0.0.1", 5678))
        assert heard == ["[::1]:7003"]
        heard.clear()


def interface(name: str, address: str, prefix_len: int, kind: LinkKind = LinkKind.ETHERNET) -> Interface:
    return Interface(name, address, prefix_len, kind, 2)


def test_each_network_gets_its_directed_and_the_limited_broadcast_and_each_link_the_group() -> None:
    interfaces = [
        interface("lo", "127.0.0.1", 8, LinkKind.LOOPBACK),
        interface("eth0", "10.1.2.3", 20),
        interface("eth0", "fe80::1", 64),
        interface("eth0", "fe80::2", 64),
        interface("eth0", "2001:db8::1", 64),
        interface("wg0", "10.9.0.1", 32, LinkKind.VPN),
    ]
    assert [(target.interface.name, target.address) for target in targets(interfaces, LOOPBACK_BROADCAST)] == [
        ("lo", LOOPBACK_BROADCAST),
        ("eth0", "10.1.15.255"),
        ("eth0", "255.255.255.255"),
        ("eth0", GROUP_V6),
    ]


def test_when_no_route_leads_to_the_lan_one_line_says_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    senders = Senders(9, LOOPBACK_BROADCAST)
    monkeypatch.setattr(Senders, "_send", lambda self, datagram, target: errno.EHOSTUNREACH)
    for _ in range(3):
        senders.announce(bytes, [interface("en0", "192.168.1.2", 24)])
    assert len(caplog.records) == 1 and "Local Network" in caplog.text


def test_an_announcement_survives_the_trip() -> None:
    own = Announcement("default", "a" * 32, 5000)
    assert decode(encode(own)) == own and len(encode(own)) < 200


@given(st.binary(max_size=2 * MAX_DATAGRAM_BYTES))
def test_any_bytes_are_decoded_or_ignored(datagram: bytes) -> None:
    decode(datagram)


@pytest.mark.parametrize("port", [0, 65536, "5000", True, None, 1.5])
def test_a_bad_port_is_ignored(port: object) -> None:
    fields = {"mesh": "exo-mesh", "v": 1, "ns": "default", "id": "x", "port": port}
    assert decode(json.dumps(fields).encode()) is None


async def test_bootstrap_peers_are_suggested_again_and_again() -> None:
    heard: list[str] = []
    static = StaticDiscovery(["10.0.0.1:5000", "10.0.0.2:5000"])
    await static.start(Announcement("default", "me", 1), heard.append)
    await until(lambda: heard.count("10.0.0.2:5000") >= 2)
    await static.stop()
    told = len(heard)
    await asyncio.sleep(0)
    assert len(heard) == told
