"""Machines that say that they sleep, and how they are woken: with real calls, and real packets on the loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.addresses import Interface, LinkKind, valid_macs
from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import InputError, UnknownPeerError
from exo_mesh.machine.wake_on_lan import magic_packet, own_macs, send_magic_packets, shared_networks
from exo_mesh.mesh.membership import sleeping
from exo_mesh.mesh.membership.known_peers import FILE_NAME, MAX_KNOWN, KnownPeers
from tests.mesh.membership.meshes import Peer, mesh, peer_info, until

MAC = "02:00:00:00:00:09"
LAN = [
    Interface("lo", "127.0.0.1", 8, LinkKind.LOOPBACK),
    Interface("eth0", "192.168.1.20", 24, LinkKind.ETHERNET),
    Interface("eth0", "fe80::1", 64, LinkKind.ETHERNET),
    Interface("eth1", "10.0.0.5", 16, LinkKind.ETHERNET),
]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.255.255.255", 0))
        sock.settimeout(10)
        yield sock


def asleep_at(peer: Peer) -> list[str]:
    return [one.name for one, _ in peer.membership.sleeps.asleep]


async def test_a_peer_that_says_that_it_sleeps_is_asleep_and_not_dead() -> None:
    async with mesh("a", "b", "c") as (a, b, c):
        assert await c.membership.sleeps.sleep() == 2
        await until(lambda: a.sees == ["b"] and b.sees == ["a"])
        assert asleep_at(a) == asleep_at(b) == ["name-c"]
        assert a.membership.lost == b.membership.lost == []
        # it keeps silent: neither it nor the others bring it back
        c.membership.suggest(a.address)
        await asyncio.sleep(0.3)
        assert a.sees == ["b"]
        c.membership.sleeps.awake()
        await until(lambda: a.sees == ["b", "c"] and b.sees == ["a", "c"])
        assert asleep_at(a) == asleep_at(b) == []
        assert c.num_returns > 0, "what others took over meanwhile is freed first"


async def test_it_comes_back_by_itself_when_the_machine_has_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "LOOK_EVERY_S", 0.02)
    async with mesh("a", "b") as (a, b):
        roster = b.membership._roster
        await b.membership.sleeps.sleep()
        await until(lambda: asleep_at(a) == ["name-b"])
        real = roster.wall_clock
        roster.wall_clock = lambda: real() + 3600  # an hour that the other clock has not seen
        await until(lambda: a.sees == ["b"])


async def test_a_machine_that_stays_awake_after_all_comes_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(sleeping, "STAYED_AWAKE_S", 0.1)
    async with mesh("a", "b") as (a, b):
        await b.membership.sleeps.sleep()
        await until(lambda: a.sees == [])
        await until(lambda: a.sees == ["b"])


async def test_a_sleeping_peer_is_woken_from_here_and_by_peers_of_its_network(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    network = Interface("lan0", "127.0.0.1", 8, LinkKind.ETHERNET)  # the loopback carries the broadcast
    monkeypatch.setattr(sleeping, "recent_interfaces", lambda: [network])
    async with mesh("a", "b") as (a, b):
        for one in (a, b):
            one.membership.sleeps._port = listener.getsockname()[1]
        known = a.membership._roster.known
        known.met(replace(peer_info("c"), macs=(MAC,), addresses=("127.0.0.9:5000",)))
        monkeypatch.setattr("exo_mesh.machine.wake_on_lan._ipv4", lambda address: network.ip)
        found = await a.membership.sleeps.wake("name-c")
        assert found.senders == ("name-a", "name-b")
        assert listener.recv(200) == b"\xff" * 6 + bytes.fromhex("020000000009") * 16
        here = await a.membership.sleeps.wake("name-b")
        assert here.is_here
        with pytest.raises(UnknownPeerError, match=r'no peer is called "nobody"; known peers: "name-a"'):
            await a.membership.sleeps.wake("nobody")


async def test_a_sleeper_is_named_as_any_other_peer() -> None:
    async with mesh("a") as (a,):
        known = a.membership._roster.known
        for peer_id, mac in (("01234567", MAC), ("01239999", "02:00:00:00:00:08")):
            known.met(replace(peer_info(peer_id), name="studio", macs=(mac,)))
        assert (await a.membership.sleeps.wake("name-a")).is_here
        assert known.named("01234", a.membership.own).macs == (MAC,)
        for text in ("studio", "0123"):
            with pytest.raises(InputError, match=r"2 peers are called .* use an id \(01234567, 01239999\)"):
                await a.membership.sleeps.wake(text)
        known.met(replace(peer_info("01239999"), name="studio", macs=(MAC,)))
        assert known.named("studio", a.membership.own).id == "01239999", "two nodes of one machine wake alike"


async def test_who_cannot_be_woken_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "recent_interfaces", lambda: LAN)
    async with mesh("a", "b") as (a, _):
        known = a.membership._roster.known
        known.met(peer_info("c"))
        with pytest.raises(InputError, match="name-c never reported a MAC address"):
            await a.membership.sleeps.wake("c")
        known.met(replace(peer_info("d"), macs=(MAC,), addresses=("172.16.0.9:5000",)))
        with pytest.raises(InputError, match="no live peer shares a network with name-d"):
            await a.membership.sleeps.wake("d")


async def test_a_bug_of_this_node_is_no_machine_that_cannot_be_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> int:
        raise KeyError("a bug")

    async with mesh("a", "b") as (a, _):
        a.membership._roster.known.met(peer_info("z", macs=(MAC,)))
        monkeypatch.setattr(a.membership.sleeps, "send_packets", broken)
        monkeypatch.setattr(sleeping, "send_magic_packets", broken)
        with pytest.raises(KeyError, match="a bug"):
            await a.membership.sleeps.wake("name-z")


def test_packets_go_only_into_networks_of_the_sleeper() -> None:
    assert shared_networks(["192.168.1.77:5000", "[fe80::9]:5000", "bad"], LAN) == [("192.168.1.20", "192.168.1.255")]
    assert shared_networks(["10.0.9.9:1", "192.168.1.9:1"], LAN) == [
        ("192.168.1.20", "192.168.1.255"),
        ("10.0.0.5", "10.0.255.255"),
    ]
    assert shared_networks(["127.0.0.1:5000", "8.8.8.8:1"], LAN) == []
    assert send_magic_packets([MAC], [("203.0.113.1", "203.0.113.255")]) == 0, "an address that is not this machine's"


def test_only_addresses_of_single_cards_count() -> None:
    told = ["02-00-00-00-00-09", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00", "01:00:5e:00:00:01", "x", MAC, "aa:bb"]
    assert valid_macs(told) == (MAC,)
    assert len(valid_macs(f"02:00:00:00:00:{number:02x}" for number in range(50))) == 8
    assert len(magic_packet(MAC)) == 102
    assert own_macs([LAN[0]]) == ()


def test_known_peers_outlive_the_node_and_are_bounded(tmp_path: Path) -> None:
    known = KnownPeers()
    for number in range(MAX_KNOWN + 9):
        known.met(PeerInfo(f"peer-{number}", 1, f"p{number}", "0.1", 1, "default", ("10.0.0.9:5000",), macs=(MAC,)))
    with pytest.raises(UnknownPeerError):
        known.named("p0", peer_info("a"))
    known.fell_asleep("peer-20", 1_000_000.0)
    (tmp_path / FILE_NAME).write_text(known.text())
    again = KnownPeers()
    again.read(tmp_path / FILE_NAME)
    found = again.named("p20", peer_info("a"))
    assert (found.macs, found.addresses) == ((MAC,), ("10.0.0.9:5000",))
    assert [one.name for one in again.asleep] == ["p20"]
    again.met(PeerInfo("peer-20", 2, "p20", "0.1", 1, "default", ()))
    assert again.asleep == []


@pytest.mark.parametrize("text", ["", "[1]", "{}", '[{"id": 3}]', '[{"id":"a","name":"b","macs":7,"addresses":[]}]'])
def test_a_spoilt_file_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    known = KnownPeers()
    known.read(tmp_path / FILE_NAME)
    assert known.asleep == []


async def test_they_are_written_for_their_user_only(tmp_path: Path) -> None:
    async with mesh("a", "b") as (a, _):
        task = asyncio.create_task(a.membership.sleeps.keep(tmp_path))
        path = tmp_path / FILE_NAME
        await until(path.exists)
        assert path.stat().st_mode & 0o777 == 0o600
        assert "name-b" in path.read_text()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
