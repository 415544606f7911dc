"""Whole nodes on the loopback: they find each other by each way alone, come and go, and leave no ghost."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.errors import InputError
from exo_mesh.mesh.discovery.choose import discoveries_for
from exo_mesh.node.node import Node
from exo_mesh.settings.config import Settings, default_settings
from tests.mesh.discovery.waiting import until
from tests.support.nodes import Machine, make_node

WAYS = ["udp", "mdns", "peers file", "bootstrap", "tailscale"]


def sees(node: Node) -> list[str]:
    return [peer.name for peer in node.membership.view.peers()]


def see_each_other(nodes: Iterable[Node]) -> bool:
    nodes = list(nodes)
    return all(len(sees(node)) == len(nodes) for node in nodes)


async def settings_for(way: str, folder: Path, stack: list[Any]) -> dict[str, Any]:
    """What two nodes need to find each other by one way; the first gets port `grpc_port`, the second the next one."""
    control_port, port = free_port(), free_port(socket.SOCK_DGRAM)
    common: dict[str, Any] = {
        "namespace": f"t{os.getpid()}-{uuid.uuid4().hex[:8]}",
        "grpc_port": control_port,
        "listen_port": port,
        "broadcast_port": port,
    }
    if way in ("udp", "mdns"):
        return {**common, "discovery": (way,)}
    if way == "bootstrap":
        return {**common, "bootstrap_peers": (f"127.0.0.1:{control_port}",)}
    if way == "peers file":
        path = folder / "peers.json"
        path.write_text(json.dumps({"peers": {"first": {"address": "127.0.0.1", "port": control_port}}}))
        return {**common, "discovery": ("manual",), "peers_file": path}

    async def devices(request: web.Request) -> web.Response:
        return web.json_response({"devices": [{"addresses": ["127.0.0.1"]}]})

    app = web.Application()
    app.router.add_get("/api/v2/tailnet/-/devices", devices)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.append(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (folder / "key").write_text("tskey")
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return {
        **common,
        "discovery": ("tailscale",),
        "tailscale_api_key_file": folder / "key",
        "tailscale_api_url": url,
    }


@pytest.mark.parametrize("way", WAYS)
async def test_two_nodes_see_each_other_by_one_way_alone(tmp_path: Path, way: str) -> None:
    undo: list[Any] = []
    settings = await settings_for(way, tmp_path, undo)
    nodes = [make_node(tmp_path / name, name, Machine(), **settings) for name in ("one", "two")]
    try:
        await nodes[0].start()
        begin = time.monotonic()
        await nodes[1].start()
        await until(lambda: see_each_other(nodes))
        print(f"{way}: two nodes see each other {time.monotonic() - begin:.2f} s after the second was started")
        assert not [reason for reason in nodes[0].observation.health().reasons if reason.code == "discovery_failed"]
        await nodes[1].stop()
        await until(lambda: sees(nodes[0]) == ["one"], what=f"{way}: a clean stop is seen")
    finally:
        await asyncio.gather(*(node.stop() for node in nodes), return_exceptions=True)
        for close in undo:
            await close()


@pytest.mark.parametrize("hosts", [("::1", "::1"), ("127.0.0.1", "::1"), ("127.0.0.2", "::1")], ids="+".join)
async def test_udp_alone_finds_nodes_at_any_address_of_the_loopback(tmp_path: Path, hosts: tuple[str, str]) -> None:
    if not all(map(can_listen_on, hosts)):
        pytest.skip("this machine has not all of these addresses")
    settings = {**await settings_for("udp", tmp_path, []), "grpc_port": 0}
    nodes = [make_node(tmp_path / f"n{n}", f"n{n}", Machine(), **settings, host=host) for n, host in enumerate(hosts)]
    try:
        for node in nodes:
            await node.start()
        await until(lambda: see_each_other(nodes), what=f"{hosts} see each other")
        await until(lambda: reached(nodes) == [[hosts[1]], [hosts[0]]])
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


def reached(nodes: list[Node]) -> list[list[str]]:
    """By which hosts each node reaches its peers."""
    return [[peer.host.strip("[]") for peer in node.membership.peers] for node in nodes]


def can_listen_on(host: str) -> bool:
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False


async def test_five_nodes_that_start_together_with_the_defaults_reach_one_view(tmp_path: Path) -> None:
    settings = await settings_for("udp", tmp_path, [])
    settings["discovery"] = default_settings().discovery
    nodes = [make_node(tmp_path / f"n{n}", f"n{n}", Machine(), **settings) for n in range(5)]
    await asyncio.gather(*(node.start() for node in nodes))

    def agree() -> bool:
        return see_each_other(nodes) and len({node.membership.view.digest() for node in nodes}) == 1

    await until(agree, what="five nodes agree on one view_digest")
    await asyncio.gather(*(node.stop() for node in nodes))


@pytest.mark.extended
async def test_twenty_restarts_leave_no_ghost(tmp_path: Path) -> None:
    settings = await settings_for("udp", tmp_path, [])
    stays = make_node(tmp_path / "stays", "stays", Machine(), **settings)
    await stays.start()
    for _ in range(20):
        comes = make_node(tmp_path / "comes", "comes", Machine(), **settings)
        await comes.start()
        await until(lambda comes=comes: see_each_other([stays, comes]))
        assert sorted(sees(stays)) == ["comes", "stays"]
        await comes.stop()
    await until(lambda: sees(stays) == ["stays"])
    await asyncio.sleep(1.0)
    assert sees(stays) == ["stays"] and not stays.membership.peers
    await stays.stop()


async def test_why_a_peer_was_refused_is_in_the_topology_of_both(tmp_path: Path) -> None:
    settings = await settings_for("bootstrap", tmp_path, [])
    one = make_node(tmp_path / "one", "one", Machine(), **settings)
    two = make_node(tmp_path / "two", "two", Machine(), **{**settings, "namespace": "office"})
    await one.start()
    await two.start()
    await until(lambda: one.observation.topology().refused and two.observation.topology().refused)
    assert "two at 127.0.0.1: namespace 5cc3f828 is not" in one.observation.topology().refused[0]
    assert "127.0.0.1:" in two.observation.topology().refused[0]
    await asyncio.gather(one.stop(), two.stop())


@pytest.mark.extended
async def test_a_link_shows_its_address_round_trip_and_goodput(tmp_path: Path) -> None:
    settings = await settings_for("bootstrap", tmp_path, [])
    nodes = [make_node(tmp_path / name, name, Machine(), **settings) for name in ("one", "two")]
    for node in nodes:
        await node.start()
    await until(lambda: all(node.membership.peers and node.membership.peers[0].paths for node in nodes))
    (link,) = nodes[0].observation.topology().links
    address = f"127.0.0.1:{nodes[1].grpc_port}"
    assert link.address == address and link.to == nodes[1].node_id
    assert link.rtt_ms > 0 and link.mb_per_s > 0
    assert [(path.address, path.kind, path.works) for path in link.paths] == [(address, "loopback", True)]
    print(f"loopback: {link.rtt_ms:.2f} ms, {link.mb_per_s:.0f} MB/s")
    await asyncio.gather(*(node.stop() for node in nodes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"discovery": ("manual",)}, "--discovery manual needs --peers-file or --bootstrap-peers"),
        ({"discovery": ("tailscale",)}, "--discovery tailscale needs --tailscale-api-key-file"),
        ({"peers_file": Path("/nowhere/peers.json")}, "/nowhere/peers.json: cannot be read"),
    ],
)
def test_a_way_that_lacks_what_it_needs_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        discoveries_for(Settings(home=tmp_path, name="x", **changes))
    assert str(caught.value).startswith(message)


def test_ways_combine_and_named_peers_come_with_any(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("a:1\n")
    settings = Settings(
        home=tmp_path, name="x", host="127.0.0.1", peers_file=tmp_path / "peers", bootstrap_peers=("b:2",)
    )
    assert [way.name for way in discoveries_for(settings)] == ["udp", "mdns", "peers file", "static"]
