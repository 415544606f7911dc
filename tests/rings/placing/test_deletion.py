"""A deleted instance stays deleted: its requests end, and no peer brings it back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exo_mesh.errors import InstanceDeletedError
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.control_split import cabled_mesh
from tests.support.nodes import MODEL, SLOW, a_request, collect, instances, mesh, runners, tokens, until


async def test_a_delete_ends_the_requests_of_an_instance_and_it_does_not_come_back(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: instances(nodes[1]))
        texts: list[list[int]] = [[], []]
        asked = [asyncio.create_task(collect(node, f"r{n}", 1500, texts[n])) for n, node in enumerate(nodes)]
        await until(lambda: all(texts))
        assert await nodes[0].instances.delete(placed.id)
        ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
        assert [type(error) for error in ended] == [InstanceDeletedError] * 2
        assert placed.id in str(ended[0]) and max(map(len, texts)) < 1500
        await until(lambda: not runners() and not any(map(instances, nodes)))
        assert len(await tokens(nodes[1], a_request())) == 12, "a later request places the model again"


@pytest.mark.extended
async def test_a_deletion_holds_on_a_peer_that_was_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cabled_mesh(tmp_path, monkeypatch, 3) as (cable, nodes):
        cable.split({"n0", "n1"}, {"n2"})
        await until(lambda: [len(node.membership.peers) for node in nodes] == [1, 1, 0])
        placed = [await node.instances.create(InstanceSpec(MODEL)) for node in (nodes[0], nodes[2])]
        assert placed[0].id == placed[1].id
        await until(lambda: instances(nodes[1]))
        assert await nodes[1].instances.delete(placed[0].id)
        await nodes[0].stop()
        assert len(runners()) == 1, "the peer that is away does not know of the deletion"
        cable.heal()
        await until(lambda: len(nodes[2].membership.peers) == 1)
        await until(lambda: not runners() and not any(map(instances, nodes[1:])), 5)
        with pytest.raises(TimeoutError):
            await until(runners, 2)
        assert len(await tokens(nodes[2], a_request())) == 12, "a later request places the model again"
