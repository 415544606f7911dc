"""The stream between two stages follows the best way between their machines, at its next dial."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exo_mesh.domain.reports import InstanceReport
from exo_mesh.mesh.membership.paths import PathKeeper
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, collect, instances, tokens, until
from tests.support.relays import SECOND, has_second_loopback
from tests.support.two_ways import TwoWays, two_ways

pytestmark = [
    pytest.mark.skipif(not has_second_loopback(), reason="this system has one loopback address"),
    pytest.mark.usefixtures("nothing_is_measured"),
]


async def placed(mesh: TwoWays) -> InstanceReport:
    await mesh.near.instances.create(InstanceSpec(MODEL, min_peers=2))
    await until(lambda: [one.state for one in instances(mesh.far)] == ["ready"])
    await until(lambda: mesh.data.open_connections == 1)  # the hop from near to far, by way of the relay
    return instances(mesh.far)[0]


@pytest.mark.extended
async def test_a_hop_whose_address_dies_goes_on_at_another_one_of_the_same_peer(tmp_path: Path) -> None:
    async with two_ways(tmp_path) as mesh:
        before = await placed(mesh)
        expected = await tokens(mesh.far, a_request("undisturbed", 60))
        got: list[int] = []
        request = asyncio.create_task(collect(mesh.far, "disturbed", 60, got))
        await until(lambda: len(got) > 10)
        mesh.control.unplug()
        mesh.data.unplug()
        async with asyncio.timeout(15):
            await request
        assert got == expected
        assert instances(mesh.far) == [before] == instances(mesh.near), "the same ballot and processes"


@pytest.mark.slow
async def test_a_data_port_that_is_blocked_at_the_best_address_is_dialled_at_the_next_one(tmp_path: Path) -> None:
    """The control plane works there, so nothing else would look for another way."""
    async with two_ways(tmp_path) as mesh:
        before = await placed(mesh)
        expected = await tokens(mesh.far, a_request("undisturbed", 60))
        got: list[int] = []
        request = asyncio.create_task(collect(mesh.far, "disturbed", 60, got))
        await until(lambda: len(got) > 10)
        mesh.data.unplug()
        async with asyncio.timeout(15):
            await request
        assert got == expected and instances(mesh.far) == [before] == instances(mesh.near)
        assert [peer.host for peer in mesh.near.membership.peers] == [SECOND]
        # the driver is at far, and reached from near by the same two addresses
        assert await tokens(mesh.near, a_request("from the other side", 60)) == expected


@pytest.mark.slow
async def test_a_better_way_is_used_at_the_next_dial_and_not_before(tmp_path: Path) -> None:
    async with two_ways(tmp_path, delay_s=0.005) as mesh:
        before = await placed(mesh)
        expected = await tokens(mesh.far, a_request("undisturbed", 60))
        got: list[int] = []
        request = asyncio.create_task(collect(mesh.far, "disturbed", 60, got))
        await until(lambda: len(got) > 5)
        (peer,) = mesh.near.membership.peers
        await PathKeeper(mesh.near.membership).measure(peer)
        assert peer.host == "127.0.0.1", "the way without a delay"
        await mesh.near._hosting.host._hops.tell()
        enough = len(got) + 5
        await until(lambda: len(got) > enough)
        assert mesh.data.open_connections == 1, "a stream that works is left alone"
        mesh.data.cut()
        async with asyncio.timeout(15):
            await request
        assert got == expected and mesh.data.accepted == 1, "the second dial went the other way"
        assert instances(mesh.far) == [before]
