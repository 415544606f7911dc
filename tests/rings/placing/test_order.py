"""One instance has one owner and one plan: whoever placed at once, died, came back, or was cut off meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.plan import Ballot, ReserveAnswer
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.errors import PlacementError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing import ownership, ring_monitor
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.control_split import cabled_mesh
from tests.support.nodes import MODEL, a_request, instances, mesh, runners, tokens, until

MB = 10**6


def ballots(nodes: list[Node]) -> set[tuple[Any, ...]]:
    """What each node says of its instances: id, ballot and digest of the plan, state."""
    return {tuple((one.id, *one.ballot, one.digest, one.state) for one in instances(node)) for node in nodes}


async def test_two_posts_at_once_make_one_instance_that_all_five_peers_agree_on(tmp_path: Path) -> None:
    async with mesh(tmp_path, 5) as nodes:
        spec = InstanceSpec(MODEL, min_peers=3)
        placed = await asyncio.gather(nodes[1].instances.create(spec), nodes[3].instances.create(spec))
        answered = time.monotonic()
        assert placed[0].digest == placed[1].digest
        await until(lambda: len(ballots(nodes)) == 1 and len(instances(nodes[0])) == 1)
        assert time.monotonic() - answered < 2
        await until(lambda: len(runners()) == 3)
        assert len({node.observation.state().view.view_digest for node in nodes}) == 1


async def test_of_two_peers_that_place_the_last_memory_one_wins_and_the_other_gets_numbers(tmp_path: Path) -> None:
    shipped = resources.files("exo_mesh.weights") / "shipped" / MODEL
    for name in ("alpha", "beta"):
        shutil.copytree(str(shipped), tmp_path / "models" / name)
    sizes = (MB, MB, 300 * MB)  # a stage takes 283 MB
    async with mesh(tmp_path, 3, usable_bytes=sizes, models_dirs=(tmp_path / "models",)) as nodes:
        outcomes = await asyncio.gather(
            nodes[0].instances.create(InstanceSpec("alpha")),
            nodes[1].instances.create(InstanceSpec("beta")),
            return_exceptions=True,
        )
        won = [outcome for outcome in outcomes if isinstance(outcome, InstanceReport)]
        lost = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert len(won) == len(lost) == 1 and isinstance(lost[0], PlacementError)
        assert won[0].stages[0].peer == nodes[2].node_id
        refusal = lost[0]
        assert refusal.reason == "memory" and refusal.need_bytes is not None and refusal.need_bytes > 283 * MB
        assert dict(refusal.have)[nodes[2].node_id] < 20 * MB, "what the winner has left"
        assert "needs 283 MB" in str(refusal)
        await until(lambda: all(len(instances(node)) == 1 for node in nodes))


@pytest.mark.extended
async def test_a_ring_whose_owner_is_cut_off_is_adopted_and_the_old_owner_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (2000 * MB, 2000 * MB, MB)
    async with cabled_mesh(tmp_path, monkeypatch, 3, sizes, engine_options={"cost_ms": "5"}) as (cable, nodes):
        placed = await nodes[2].instances.create(InstanceSpec(MODEL, min_peers=2))
        members = sorted(stage.peer for stage in placed.stages)
        assert members == sorted(node.node_id for node in nodes[:2])
        await until(lambda: len(ballots(nodes)) == 1 and instances(nodes[0]))
        request = asyncio.create_task(tokens(nodes[0], a_request(max_tokens=500)))

        cable.split({"n0", "n1"}, {"n2"})
        await until(lambda: [one.owner for one in instances(nodes[0])] == [members[0]])
        await until(lambda: len(ballots(nodes[:2])) == 1)
        (adopted,) = instances(nodes[0])
        assert Ballot(*adopted.ballot) > Ballot(*placed.ballot) and adopted.ballot[1] == members[0]
        assert adopted.digest == placed.digest, "the same ring"

        cable.heal()
        await until(lambda: len(ballots(nodes)) == 1 and len(nodes[2].membership.peers) == 2)
        (seen,) = instances(nodes[2])
        assert seen.owner == members[0] and seen.ballot == adopted.ballot
        await until(lambda: not nodes[2]._owning.owned_rings.monitors)
        assert [stage.pid for stage in seen.stages] == [stage.pid for stage in placed.stages]
        assert set(runners()) == {stage.pid for stage in placed.stages}, "no stage was started again"
        assert len(await request) == 500

        await nodes[0]._hosting.host.release(placed.id, Ballot(*placed.ballot))
        assert len(runners()) == 2, "the old owner's word counts no more"
        assert await nodes[2].instances.delete(placed.id)
        await until(lambda: not runners())


@pytest.mark.slow
async def test_a_mesh_split_in_two_places_on_both_sides_and_heals_to_one_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "ORPHAN_S", 1.0)
    async with cabled_mesh(tmp_path, monkeypatch, 4) as (cable, nodes):
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=4))
        await until(lambda: len(ballots(nodes)) == 1 and instances(nodes[3]))
        sides = (nodes[:2], nodes[2:])
        cable.split({"n0", "n1"}, {"n2", "n3"})
        await until(lambda: all(len(node.membership.peers) == 1 for node in nodes))
        texts = await asyncio.gather(*(tokens(side[0], a_request(f"r{n}")) for n, side in enumerate(sides)))
        assert texts[0] == texts[1]
        # the cable carries no calls between the sides, but frames: the old owner may learn late that its ring is split
        await until(lambda: all(_own_rings(side) == ["ready"] for side in sides))
        texts += await asyncio.gather(*(tokens(side[1], a_request(f"s{n}")) for n, side in enumerate(sides)))
        assert texts[0] == texts[2] == texts[3]
        assert len(ballots([nodes[0], nodes[2]])) == 2

        cable.heal()
        await until(lambda: all(len(node.membership.peers) == 3 for node in nodes))
        await until(lambda: len(ballots(nodes)) == 1 and len(instances(nodes[0])) == 1)
        (survivor,) = instances(nodes[0])
        await until(lambda: set(runners()) == {stage.pid for stage in survivor.stages})
        assert sum(len(node._owning.owned_rings.monitors) for node in nodes) == 1
        await until(lambda: len({node.observation.state().view.view_digest for node in nodes}) == 1)
        assert await tokens(nodes[1], a_request("after")) == texts[0]


def _own_rings(side: Sequence[Node]) -> list[str]:
    """The states of the rings that lie on this side alone, as its first node sees them."""
    ids = {node.node_id for node in side}
    return [one.state for one in instances(side[0]) if {stage.peer for stage in one.stages} <= ids]


async def test_both_sides_of_a_split_adopt_or_replace_rings_that_lie_on_their_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner stays with one side; the ring lies on the other, which adopts it; the owner's side places its own."""
    monkeypatch.setattr(ownership, "ORPHAN_S", 1.0)
    async with cabled_mesh(tmp_path, monkeypatch, 4) as (cable, nodes):
        ring = (Pin("n2", 0, 4), Pin("n3", 4, 8))
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=ring))
        await until(lambda: len(ballots(nodes)) == 1 and instances(nodes[3]))
        cable.split({"n0", "n1"}, {"n2", "n3"})
        members = {nodes[2].node_id, nodes[3].node_id}
        await until(lambda: [one.owner in members for one in instances(nodes[2])] == [True])
        await until(lambda: len(nodes[0].membership.peers) == 1)
        assert len(await tokens(nodes[0], a_request("r"))) == 12, "placed anew on the owner's side"

        cable.heal()
        await until(lambda: all(len(node.membership.peers) == 3 for node in nodes))
        await until(lambda: len(ballots(nodes)) == 1 and len(instances(nodes[0])) == 1)
        (survivor,) = instances(nodes[1])
        assert Ballot(*survivor.ballot) > Ballot(*placed.ballot)
        await until(lambda: set(runners()) == {stage.pid for stage in survivor.stages})
        await until(lambda: sum(len(node._owning.owned_rings.monitors) for node in nodes) == 1)


@pytest.mark.extended
async def test_a_stage_that_nobody_owns_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "ORPHAN_S", 0.5)
    async with mesh(tmp_path, 2) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, pins=(Pin("n1", 0, 8),)))
        (keeper,) = nodes[0]._owning.owned_rings.monitors.values()
        nodes[0]._owning.owned_rings.monitors.clear()
        await keeper.close()
        nodes[0].membership.put_instance(keeper.plan.instance_id, None)
        await until(lambda: not runners())
        assert nodes[1].membership.telemetry[nodes[1].node_id].reserved_bytes == 0


@pytest.mark.slow
async def test_a_ring_that_was_adopted_in_part_goes_on_when_its_owner_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage has promised itself to an adopter, the other has not; then the owner is there again."""
    monkeypatch.setattr(ring_monitor, "REATTACH_S", 30.0)
    sizes = (2000 * MB, 2000 * MB, MB)
    async with cabled_mesh(tmp_path, monkeypatch, 3, sizes, engine_options={"cost_ms": "5"}) as (cable, nodes):
        placed = await nodes[2].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: len(ballots(nodes)) == 1 and instances(nodes[0]))
        first, second = sorted(nodes[:2], key=lambda node: node.node_id)
        request = asyncio.create_task(tokens(nodes[0], a_request(max_tokens=500)))

        adopt = second._hosting.host.adopt

        async def not_by_the_first(instance_id: str, ballot: Ballot, adopted: Ballot) -> ReserveAnswer:
            if adopted.proposer == first.node_id:
                return ReserveAnswer(False, 0, "this call gets lost")
            return await adopt(instance_id, ballot, adopted)

        monkeypatch.setattr(second._hosting.host, "adopt", not_by_the_first)
        cable.split({"n0", "n1"}, {"n2"})  # the streams of the owner break as well
        (lease,) = first._hosting.host.leases
        await until(lambda: lease.adopted.proposer == first.node_id)
        assert not first._owning.owned_rings.monitors, "no owner of one stage alone"
        cable.heal()
        await until(lambda: all(len(node.membership.peers) == 2 for node in nodes))
        await until(lambda: len(ballots(nodes)) == 1 and instances(nodes[0])[0].ballot != placed.ballot)
        (seen,) = instances(nodes[0])
        assert seen.owner == nodes[2].node_id and seen.digest == placed.digest
        assert second._hosting.host.leases[0].ballot == Ballot(*seen.ballot)
        assert set(runners()) == {stage.pid for stage in placed.stages}, "no stage was started again"
        assert len(await request) == 500
        assert await nodes[1].instances.delete(placed.id)
        await until(lambda: not runners())
