"""Two peers of which one does not get through to the other, while the rest of the mesh reaches both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exo_mesh.node.node import Node
from exo_mesh.rings.placing import instances as instances_module
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import GB, MODEL, a_request, instances, mesh, tokens, until

NOWHERE = "127.0.0.1:1"


def cut(node: Node, other: Node) -> list[str]:
    """From now on `node` gets no answer from the other one, which still calls it. Returns the addresses to restore."""
    peer = node.membership.peer(other.node_id)
    assert peer is not None
    addresses, peer.addresses = peer.addresses, [NOWHERE]
    peer.use(peer.client.at(NOWHERE))
    return addresses


def restore(node: Node, other: Node, addresses: list[str]) -> None:
    peer = node.membership.peer(other.node_id)
    assert peer is not None
    peer.addresses = addresses
    peer.use(peer.client.at(addresses[0]))


async def test_a_peer_that_others_reach_is_alive_and_known_not_to_answer_here(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3) as (one, other, third):
        assert one.membership.unanswered_s(other.node_id) == 0
        addresses = cut(one, other)
        await until(lambda: one.membership.unanswered_s(other.node_id) > 0)
        assert one.membership.is_alive(other.node_id)
        assert third.membership.unanswered_s(other.node_id) == 0
        restore(one, other, addresses)
        await until(lambda: one.membership.unanswered_s(other.node_id) == 0)


async def test_of_a_lost_hop_the_end_that_its_neighbour_does_not_reach_is_left_out(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=3))
        (instance,) = nodes[0]._owning.instances.of_model(MODEL)
        lost_hops, ring = nodes[0]._owning.owned_rings._recoverer.lost_hops, instance.plan.peer_ids
        at = {node.node_id: node for node in nodes}

        async def suspects(hop: int | None, *, is_known: bool = False) -> tuple[str, ...]:
            lost_hops._lost_at.clear()
            return await lost_hops.suspects(instance.plan, hop, is_out_of_reach=is_known)

        assert [await suspects(hop) for hop in (None, 0, 1, 2)] == [()] * 4, "they reach each other: it is made anew"
        for hop in range(3):
            before, behind = at[ring[hop]], at[ring[(hop + 1) % 3]]
            addresses = cut(before, behind)
            left_out = before if behind is nodes[0] else behind
            assert await suspects(hop) == (left_out.node_id,)
            restore(before, behind, addresses)
            assert await suspects(hop, is_known=True) == (left_out.node_id,), "the node of the stage has tried"


async def test_a_request_waits_for_the_recovery_of_its_ring_at_the_same_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once would end each other's stages. The view still says that the ring is ready."""
    monkeypatch.setattr(instances_module, "OWNER_S", 0.0)
    async with mesh(tmp_path, 2) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: all(instances(node) for node in nodes))
        (instance,) = nodes[0]._owning.instances.of_model(MODEL)
        near, driver = sorted(nodes, key=lambda node: node.node_id == instance.plan.peer_ids[-1])
        owning, instance_id, done = near._owning, instance.plan.instance_id, asyncio.Event()
        owning.owned_rings._start_recovery(instance_id, instance.ballot, _until(done))
        cut(near, driver)
        await until(lambda: near.membership.unanswered_s(driver.node_id) > 0)
        owning.instances.distrust(instance)  # a request has failed there
        waiting = asyncio.create_task(owning.instances._await_recovery(instance_id))
        assert not (await asyncio.wait((waiting,), timeout=0.3))[0]
        done.set()
        async with asyncio.timeout(10):
            await waiting


async def _until(done: asyncio.Event) -> None:
    await done.wait()


@pytest.mark.extended
async def test_a_ring_whose_driver_does_not_answer_here_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are well with it, so nobody mends it: the entry peer goes on with whom it reaches."""
    monkeypatch.setattr(instances_module, "OWNER_S", 3600.0)
    async with mesh(tmp_path, 3, usable_bytes=(2 * GB, 2 * GB, GB // 10)) as nodes:
        expected = await tokens(nodes[2], a_request())
        await nodes[0].instances.delete(instances(nodes[0])[0].id)
        await until(lambda: not any(instances(node) for node in nodes))
        before = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: [(one.ballot, one.state) for one in instances(nodes[2])] == [(before.ballot, "ready")])
        (instance,) = nodes[2]._owning.instances.of_model(MODEL)
        driver = next(node for node in nodes if node.node_id == instance.plan.peer_ids[-1])
        cut(nodes[2], driver)
        await until(lambda: nodes[2].membership.unanswered_s(driver.node_id) > 0)
        assert nodes[2]._owning.instances.is_trusted(instance), (
            "that alone is no reason: the way to its runner may be good"
        )
        nodes[2]._owning.instances.distrust(instance)  # a request has failed there
        async with asyncio.timeout(30):
            assert await tokens(nodes[2], a_request("again")) == expected
        (after,) = instances(nodes[2])
        assert driver.node_id not in {stage.peer for stage in after.stages}


@pytest.mark.extended
async def test_a_driver_that_answers_again_is_trusted_again(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, usable_bytes=(2 * GB, 2 * GB, GB // 10)) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: [one.state for one in instances(nodes[2])] == ["ready"])
        (instance,) = nodes[2]._owning.instances.of_model(MODEL)
        driver = next(node for node in nodes if node.node_id == instance.plan.peer_ids[-1])
        addresses = cut(nodes[2], driver)
        await until(lambda: nodes[2].membership.unanswered_s(driver.node_id) > 0)
        nodes[2]._owning.instances._out_of_reach.add(driver.node_id)
        assert not nodes[2]._owning.instances.is_trusted(instance)
        restore(nodes[2], driver, addresses)
        await until(lambda: nodes[2]._owning.instances.is_trusted(instance))
