"""Peers in other roles: some hold no layers, some only if they must, and some place nothing by themselves."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing
from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.plan import NO_BALLOT
from exo_mesh.domain.request import FLEX_PRIORITY, TokenEvent
from exo_mesh.errors import InputError, NoInstanceError, PlacementError, ReservationError
from exo_mesh.models.cards.toml_card import PlacementSection, TomlCard
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import (
    GB,
    MODEL,
    SLOW,
    Machine,
    a_request,
    collect,
    crash,
    instances,
    make_node,
    mesh,
    tokens,
    until,
)


def holders(node: Node) -> list[set[str]]:
    return [{stage.peer for stage in one.stages} for one in instances(node)]


async def test_an_api_peer_serves_requests_and_is_given_no_layers(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, each=({"role": "api"}, {})) as (entry, full):
        got = await tokens(entry, a_request("r", 12))
        assert len(got) == 12 and got == await tokens(full, a_request("s", 12))
        assert holders(entry) == [{full.node_id}]
        roles = {peer.id: peer.role for peer in full.observation.state().view.peers}
        assert roles == {entry.node_id: "api", full.node_id: "full"}
        assert {peer.role for peer in full.observation.topology().peers} == {"api", "full"}
        assert full.membership.telemetry[entry.node_id].usable_bytes == 0
        # an owner of an older version does not know the role, and asks
        (instance,) = entry._owning.instances.of_model(MODEL)
        stage = replace(instance.plan.stages[0], peer_id=entry.node_id)
        plan = replace(instance.plan, ballot=instance.ballot.next_for(full.node_id), stages=(stage,))
        with pytest.raises(ReservationError, match="n0 holds no layers: --role is api"):
            await entry._hosting.host.reserve(plan, 0)


@pytest.mark.extended
@pytest.mark.parametrize("settings", [{"role": "api"}, {"max_memory_bytes": 0}])
async def test_a_mesh_without_a_peer_for_layers_says_so(tmp_path: Path, settings: dict[str, object]) -> None:
    async with mesh(tmp_path, 2, **settings) as nodes:
        with pytest.raises(PlacementError, match=r"n0 holds no layers.*n1 holds no layers") as refusal:
            await tokens(nodes[0], a_request("r"))
        assert refusal.value.code == "no_placement" and "start another peer" in refusal.value.remedy
        with pytest.raises(PlacementError, match="n0 holds no layers"):
            await nodes[1].instances.context_limit(MODEL)
        with pytest.raises(PlacementError, match="n1 holds no layers"):
            await nodes[0].instances.previews(InstanceSpec(MODEL))


@pytest.mark.extended
async def test_layers_named_by_hand_are_refused_by_an_api_peer(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, each=({"role": "api"}, {})) as (entry, full):
        with pytest.raises(PlacementError, match=r"asked to run on at least 2 peers.*n0 holds no layers"):
            await full.instances.create(InstanceSpec(MODEL, min_peers=2))
        with pytest.raises(PlacementError, match="n0 holds no layers"):
            await full.instances.create(InstanceSpec(MODEL, exclude_peers=(full.node_id,)))
        with pytest.raises(InputError, match=f"{entry.node_id[:8]} is given layers but cannot take part"):
            await full.instances.create(InstanceSpec(MODEL, pins=(Pin(entry.node_id, 0, 8),)))


@pytest.mark.extended
async def test_an_edge_peer_gets_layers_only_if_the_others_cannot_do_without_it(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, usable_bytes=(8 * GB, GB, GB), each=({"role": "edge"}, {}, {})) as nodes:
        edge, *full = (node.node_id for node in nodes)
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        assert holders(nodes[0]) == [set(full)], "although the edge peer proposed it and has the most memory"
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=3))
        assert {edge, *full} in holders(nodes[0])


@pytest.mark.extended
async def test_a_ring_moves_off_a_peer_that_restarts_in_another_role(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=3))
        expected = await tokens(nodes[0], a_request("before", 100))
        got: list[int] = []
        running = asyncio.create_task(collect(nodes[0], "r", 100, got))
        await until(lambda: len(got) > 3)
        address = f"127.0.0.1:{nodes[0].grpc_port}"
        gone = nodes[2].node_id
        await nodes[2].stop()
        again = make_node(tmp_path / "n2", "n2", Machine(), bootstrap_peers=(address,), role="api", engine_options=SLOW)
        nodes[2] = again
        await again.start()
        async with asyncio.timeout(40):
            await running
        assert got == expected and again.node_id == gone
        await until(lambda: all(gone not in held for held in holders(nodes[0])) and bool(holders(nodes[0])))
        assert not again._hosting.host.runners
        assert await tokens(again, a_request("after", 100)) == expected


@pytest.mark.extended
async def test_the_death_of_an_api_peer_takes_no_ring_with_it(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW, each=({}, {}, {"role": "api"})) as nodes:
        entry = nodes.pop()
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        before = instances(nodes[0])[0]
        got: list[int] = []
        running = asyncio.create_task(collect(entry, "r", 400, got))
        await until(lambda: len(got) > 3)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await crash(entry)
        assert len(await tokens(nodes[0], a_request("after", 20))) == 20
        await until(lambda: not any(stage.beat.queued + stage.beat.running for stage in nodes[0]._hosting.host.beats()))
        after = instances(nodes[0])[0]
        assert (before.id, before.ballot) == (after.id, after.ballot), "nothing was placed again"
        await entry.stop()


async def test_without_auto_place_a_request_needs_an_instance(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, auto_place=False) as (node,):
        remedy = f'No instance found for model {MODEL}.*POST /instance {{"model": "{MODEL}"}}'
        with pytest.raises(NoInstanceError, match=remedy):
            await tokens(node, a_request("early"))
        assert not instances(node)
        placed = await node.instances.create(InstanceSpec(MODEL))
        assert len(await tokens(node, a_request("r", 8))) == 8
        await node.instances.delete(placed.id)
        with pytest.raises(NoInstanceError):
            await tokens(node, a_request("late"))


@pytest.mark.extended
async def test_without_auto_place_a_lost_ring_is_still_recovered(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, engine_options=SLOW, auto_place=False) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        expected = await tokens(nodes[0], a_request("before", 60))
        lost = next(node for node in nodes[1:] if node.node_id in holders(nodes[0])[0])
        asking = next(node for node in nodes if node is not lost)
        got: list[int] = []
        running = asyncio.create_task(collect(asking, "r", 60, got))
        await until(lambda: len(got) > 3)
        nodes.remove(lost)
        await lost.stop()
        fresh = asyncio.create_task(tokens(asking, a_request("while it recovers", 60)))
        async with asyncio.timeout(40):
            await running
            assert await fresh == expected == got


@pytest.mark.extended
@pytest.mark.parametrize("limit", [{"no_batch": True}, {"max_batch_size": 2}])
async def test_no_more_requests_run_at_once_than_the_setting_says(tmp_path: Path, limit: dict[str, object]) -> None:
    async with mesh(tmp_path, 1, engine_options=SLOW, **limit) as (node,):
        await node.instances.create(InstanceSpec(MODEL))
        expected = await tokens(node, a_request("alone", 30))
        seen: list[int] = []
        answers = [asyncio.create_task(tokens(node, a_request(f"r{number}", 30))) for number in range(4)]
        while not all(answer.done() for answer in answers):
            seen += [stage.beat.running for stage in node._hosting.host.beats()]
            await asyncio.wait(answers, timeout=0.05)
        assert [answer.result() for answer in answers] == [expected] * 4
        assert max(seen) <= (1 if "no_batch" in limit else 2), "as the heartbeats of the runner say"


@pytest.mark.extended
async def test_a_flood_of_flex_requests_does_not_delay_another_request_for_long(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, engine_options=SLOW, max_batch_size=2) as (node,):
        await node.instances.create(InstanceSpec(MODEL))
        expected = await tokens(node, a_request("alone", 100))
        order: list[str] = []

        async def ask(name: str, priority: int) -> list[int]:
            got: list[int] = []
            async with aclosing(
                node.requests.generate(MODEL, dataclasses.replace(a_request(name, 100), priority=priority))
            ) as items:
                async for item in items:
                    if isinstance(item, TokenEvent) and item.token_id is not None:
                        got.append(item.token_id)
            order.append(name)
            return got

        flood = [asyncio.create_task(ask(f"flex {number}", FLEX_PRIORITY)) for number in range(6)]
        await until(lambda: node._hosting.host.beats()[0].beat.running == 2)
        await ask("normal", 0)
        assert order.index("normal") <= 2, "at most those end before it that had begun"
        assert await asyncio.gather(*flood) == [expected] * 6, "what was interrupted goes on where it was"


@pytest.mark.extended
async def test_the_card_of_a_model_says_which_peers_run_it_and_how_long_its_context_is(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, context_limit=None) as nodes:
        shelf = nodes[0]._models.shelf

        async def describe(**rules: object) -> None:
            await shelf.add_card(TomlCard(id=MODEL, placement=PlacementSection(**rules)))  # type: ignore[arg-type]
            await until(lambda: nodes[1]._models.shelf.rules_of(MODEL) == shelf.rules_of(MODEL))

        await describe(max_context_tokens=1024, excluded_peers=("n0",))
        placed = await nodes[0].instances.create(InstanceSpec(MODEL))
        assert placed.context_limit == 1024
        assert {stage.peer for stage in placed.stages} == {nodes[1].node_id}
        await nodes[0].instances.delete(placed.id)
        longer = await nodes[0].instances.create(InstanceSpec(MODEL, context_limit=2048))
        assert longer.context_limit == 2048, "a limit that was asked for wins"
        await nodes[0].instances.delete(longer.id)
        await describe(compatible_backends=("mlx", "dummy-gpu"))
        with pytest.raises(PlacementError, match="n0 has none of the backends that the card allows"):
            await nodes[1].instances.create(InstanceSpec(MODEL))
        with pytest.raises(PlacementError, match="none of the backends"):
            await nodes[1].instances.create(InstanceSpec(MODEL, engine="dummy"))
        await describe(min_vram_gib=500_000)
        with pytest.raises(PlacementError, match="n1 has less memory than the 500000 GiB"):
            await nodes[0].instances.create(InstanceSpec(MODEL))
        assert nodes[0]._owning.owned_rings.known.above(f"{MODEL}-1") > NO_BALLOT


@pytest.mark.extended
async def test_a_lost_stage_goes_to_no_edge_peer_while_others_can_take_it(tmp_path: Path) -> None:
    async with mesh(tmp_path, 4, engine_options=SLOW, each=({}, {}, {}, {"role": "edge"})) as nodes:
        edge = nodes[3].node_id
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=3))
        assert edge not in holders(nodes[0])[0]
        lost = nodes.pop(2)
        await lost.stop()
        await until(lambda: bool(holders(nodes[0])) and lost.node_id not in holders(nodes[0])[0])
        assert len(await tokens(nodes[0], a_request("after", 20))) == 20
        assert holders(nodes[0]) == [{nodes[0].node_id, nodes[1].node_id}]
