"""mDNS on the loopback: found, told apart by namespace, gone at once when it stops."""

from __future__ import annotations

import os
import uuid

import pytest

from exo_mesh.mesh.discovery.mdns import SERVICE_TYPE, MdnsDiscovery, addresses_in, service_info
from exo_mesh.mesh.discovery.port import Announcement
from tests.mesh.discovery.waiting import until

NAMESPACE = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
"""The loopback's multicast is shared with whatever else runs on this machine."""


def announcement(node_id: str, port: int, **changes: str) -> Announcement:
    return Announcement(changes.get("namespace", NAMESPACE), node_id, port, changes.get("name", node_id), 1)


async def test_nodes_on_one_machine_find_each_other_and_not_themselves_nor_strangers() -> None:
    heard: dict[str, set[str]] = {name: set() for name in ("a", "b", "c")}
    nodes = {name: MdnsDiscovery(host="127.0.0.1", loopback_only=True) for name in heard}
    for port, name in enumerate(heard, start=7001):
        own = announcement(name * 32, port, **({"namespace": "elsewhere"} if name == "c" else {}))
        await nodes[name].start(own, heard[name].add)
    await until(lambda: heard["a"] and heard["b"], what="mdns: a and b found each other")
    assert heard == {"a": {"127.0.0.1:7002"}, "b": {"127.0.0.1:7001"}, "c": set()}
    await nodes["b"].stop()
    gone = f"exo-mesh-{'b' * 16}.{SERVICE_TYPE}"
    await until(lambda: gone not in nodes["a"]._found, what="mdns: goodbye heard")
    for name in ("a", "c"):
        await nodes[name].stop()


@pytest.mark.extended
async def test_a_node_that_moves_to_another_port_is_found_there() -> None:
    heard: list[str] = []
    watcher = MdnsDiscovery(host="127.0.0.1", loopback_only=True)
    await watcher.start(announcement("w" * 32, 7001), heard.append)
    for port in (7002, 7003):
        mover = MdnsDiscovery(host="127.0.0.1", loopback_only=True)
        await mover.start(announcement("m" * 32, port), lambda address: None)
        await until(lambda port=port: f"127.0.0.1:{port}" in heard)
        await mover.stop()
    await watcher.stop()


@pytest.mark.parametrize("name", ["studio", "Büro 2 – Küche", "x" * 500, ""])
def test_what_is_registered_reads_back(name: str) -> None:
    own = announcement("a" * 32, 5000, name=name)
    info = service_info(own, ("192.168.1.20:5000", "[2001:db8::1]:5000", "studio.local:5000"))
    assert info.name == f"exo-mesh-{'a' * 16}.{SERVICE_TYPE}"
    assert info.decoded_properties == {"id": "a" * 32, "ns": NAMESPACE, "proto": "1", "name": name[:120]}
    other = announcement("b" * 32, 1)
    assert addresses_in(info, other) == ["192.168.1.20:5000", "[2001:db8::1]:5000"]
    assert addresses_in(info, own) == [] and addresses_in(info, announcement("b", 1, namespace="x")) == []
