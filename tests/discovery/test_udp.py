"""Announcements on the loopback: nodes of one machine find each other; garbage and strangers are ignored."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.discovery.port import Announcement
from exo_mesh.discovery.static import StaticDiscovery
from exo_mesh.discovery.udp import LOOPBACK_BROADCAST, MAX_DATAGRAM_BYTES, UdpDiscovery, decode, encode


def free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_nodes_on_one_machine_find_each_other_and_not_themselves() -> None:
    port = free_udp_port()
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
    port = free_udp_port()
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
