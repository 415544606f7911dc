"""The mesh is told when the addresses of a machine change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from exo_mesh.domain.addresses import Interface, LinkKind
from exo_mesh.machine import this_machine
from exo_mesh.machine.interfaces import RecentInterfaces, read_interfaces
from exo_mesh.node import housekeeping
from tests.mesh.membership.meshes import mesh, until


async def test_new_addresses_reach_the_peers_and_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh("a", "b") as (a, b):
        told = (b.address, "127.0.0.1:9")
        monkeypatch.setattr(housekeeping, "ADDRESSES_EVERY_S", 0.01)
        monkeypatch.setattr(this_machine, "addresses", lambda host, port, types: told)
        task = asyncio.create_task(housekeeping.keep_addresses(b.membership, "0.0.0.0", 1))
        await until(lambda: a.membership.peers[0].info.addresses == told)
        assert "127.0.0.1:9" in a.membership.peers[0].addresses
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_interfaces_are_read_once_a_second_at_most() -> None:
    now = 0.0
    readings: Iterator[list[Interface]] = iter([[Interface("a", "10.0.0.1", 8, LinkKind.ETHERNET)], []])
    recent = RecentInterfaces(lambda: next(readings), lambda: now)
    assert recent() is recent()
    now = 1.5
    assert recent() == []


def test_the_loopback_is_among_the_interfaces_of_this_machine() -> None:
    found = {item.address: item for item in read_interfaces()}
    assert found["127.0.0.1"].kind is LinkKind.LOOPBACK and found["127.0.0.1"].prefix_len == 8
