"""Tensor groups as their nodes form, watch and end them: real nodes and rank processes, an engine without weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.api.decoding import decode_body
from exo_mesh.api.placement_options import InstanceBody, instance_spec
from exo_mesh.domain.device import RdmaPort
from exo_mesh.domain.grouping import GroupWish
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup
from exo_mesh.errors import InputError, PendingPlacementError, PlacementError
from exo_mesh.node.node import Node
from exo_mesh.rings.hosting.collectives import collective_endpoint, wiring_fault
from exo_mesh.rings.hosting.runner_starter import HostLimits
from exo_mesh.rings.placing import tensor_groups
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.placing.tensor_groups import GroupTroubles, wirings
from tests.support.nodes import MODEL, a_request, crash, instances, mesh, runners, tokens, until

PAIR = InstanceSpec(MODEL, tensor_group=2, group_backend="ring")


async def alone(tmp_path: Path) -> list[int]:
    async with mesh(tmp_path / "alone", 1) as (node,):
        return await tokens(node, a_request())


def shape(instance: InstanceReport) -> list[int]:
    """How many peers each stage is."""
    return [len(stage.peers) for stage in instance.stages]


def rank_runners(nodes: list[Node]) -> list[Any]:
    """The runners of all nodes, by node."""
    return [next(iter(node._hosting.host._runners.values()), None) for node in nodes]


async def test_a_group_is_formed_serves_and_ends_without_a_trace(tmp_path: Path) -> None:
    expected = await alone(tmp_path)
    async with mesh(tmp_path, 2) as nodes:
        instance = await nodes[0].instances.create(PAIR)
        assert shape(instance) == [2] and instance.reason == ""
        assert await tokens(nodes[1], a_request()) == expected
        assert len(runners()) == 2
        shown = [node.observation.memory(whole_mesh=False)["stages"][0]["group"] for node in nodes]
        assert sorted(one["rank"] for one in shown) == [0, 1] and {one["ranks"] for one in shown} == {2}
        assert {one["kv_heads"] for one in shown} == {None}, "the dummy engine has no heads"
        assert (await nodes[1].instances.create(PAIR)).digest == instance.digest, "it suits whoever asks for one"
        assert await nodes[1].instances.delete(instance.id)
        await until(lambda: not runners())
        await until(lambda: all(node._hosting.host.memory.reserved_bytes == 0 for node in nodes))


@pytest.mark.extended
async def test_a_group_and_a_single_peer_share_a_ring_in_either_order(tmp_path: Path) -> None:
    expected = await alone(tmp_path)
    async with mesh(tmp_path, 3) as nodes:
        first = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=3, tensor_group=2, group_backend="ring"))
        assert shape(first) == [2, 1]
        assert await tokens(nodes[2], a_request()) == expected
        await nodes[0].instances.delete(first.id)
        pins = (Pin("n2", 0, 3), Pin("n0", 3, 8, group=("n0", "n1"), group_backend="ring"))
        second = await nodes[1].instances.create(InstanceSpec(MODEL, pins=pins))
        assert shape(second) == [1, 2]
        assert await tokens(nodes[0], a_request()) == expected


@pytest.mark.extended
async def test_a_rank_that_is_killed_while_serving_ends_the_group_and_the_request_goes_on(tmp_path: Path) -> None:
    expected = await alone(tmp_path)
    async with mesh(tmp_path, 2, engine_options={"cost_ms": "50"}) as nodes:
        await nodes[0].instances.create(PAIR)
        before = rank_runners(nodes)
        victim = before[1] if before[1]._start.rank.rank == 1 else before[0]
        asking = asyncio.create_task(tokens(nodes[0], a_request()))
        await until(lambda: any(runner.beat is not None and runner.beat.tokens >= 2 for runner in before))
        os.kill(victim.pid, signal.SIGKILL)
        assert await asking == expected
        assert all(runner is not old for runner, old in zip(rank_runners(nodes), before, strict=True))


@pytest.mark.extended
async def test_a_group_that_fails_twice_becomes_a_pipeline_of_the_same_peers_and_says_why(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options={"fail_group": "1"}) as nodes:
        instance = await nodes[0].instances.create(PAIR)
        assert shape(instance) == [1, 1]
        assert "failed to become a tensor group 2 times" in instance.reason
        assert "compute wrong results, as the option fail_group demands" in instance.reason
        assert instance.ballot[0] == 3, "two groups were tried, each by a ballot of its own"
        assert (await nodes[0].instances.create(PAIR)).digest == instance.digest, "nobody tries again at once"
        await until(lambda: any(i.state == "ready" and i.reason for i in instances(nodes[1])))
        assert len(runners()) == 2


def cable(nodes: list[Node], max_queue_pairs: int = 0) -> None:
    """Each of two nodes says that an RDMA cable leads to the other, as two Macs would."""
    for own, other in ((0, 1), (1, 0)):
        port = RdmaPort(f"rdma_en{own}", True, f"domain-{own}", f"domain-{other}", "80 Gb/s", max_queue_pairs)
        nodes[own].membership.describe(replace(nodes[own].membership.own, rdma_ports=(port,)))


async def test_a_second_group_over_a_cable_is_refused_once_its_queue_pairs_are_taken(tmp_path: Path) -> None:
    """Before any process is started, with the device and the numbers: MLX would find it out while the ranks meet."""
    async with mesh(tmp_path, 2, engine_options={"reduce_ms": "0.01"}) as nodes:
        cable(nodes, max_queue_pairs=1)
        await until(lambda: all(any(c.up for c in node.observation.topology().cables) for node in nodes))
        pair = InstanceSpec(MODEL, tensor_group=2, group_backend="jaccl")
        assert shape(await nodes[0].instances.create(pair)) == [2]
        with pytest.raises(PlacementError, match=r"rdma_en\d of \w+ has 0 queue pairs left and this group needs 1"):
            await nodes[1].instances.preview(pair)


@pytest.mark.parametrize(
    ("reduce_ms", "is_group"), [("0.01", True), pytest.param("50", False, marks=pytest.mark.extended)]
)
async def test_what_a_group_measures_decides_whether_it_stays_one(
    tmp_path: Path, reduce_ms: str, is_group: bool
) -> None:
    """A layer is said to take 1 ms: two all-reduces of 10 us are worth half of it, two of 50 ms are not."""
    async with mesh(tmp_path, 2, engine_options={"reduce_ms": reduce_ms}) as nodes:
        cable(nodes)
        await until(lambda: all(any(c.up for c in node.observation.topology().cables) for node in nodes))
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        assert shape(instance) == ([2] if is_group else [1, 1])
        assert ("better as stages" in instance.reason) is not is_group
        shown = await nodes[0].instances.previews(InstanceSpec(MODEL))
        (entry,) = [one for one in shown if one["width"] == 2]
        assert ("better as a group" if is_group else "better as stages") in entry["note"]
        assert len(await tokens(nodes[1], a_request())) == 12
        forced = await nodes[0].instances.create(InstanceSpec(MODEL, tensor_group=2))
        assert shape(forced) == [2], "who insists gets it"


@pytest.mark.extended
async def test_ranks_that_never_start_are_given_up_and_their_peers_become_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two processes of one node hang before they say a word; later ones are well."""
    runner = tmp_path / "runner.sh"
    runner.write_text(
        f'#!/bin/sh\ncd {tmp_path}\n[ -e second ] && exec {sys.executable} -m exo_mesh.rings.runner "$@"\n'
        "[ -e first ] && touch second\ntouch first\nsleep 60\n"
    )
    runner.chmod(0o755)
    async with mesh(tmp_path, 2) as nodes:
        limits = HostLimits(RunnerLimits(first_message_s=2.5), command=(str(runner),))
        monkeypatch.setattr(nodes[1]._hosting.host._starter, "_limits", limits)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        instance = await nodes[0].instances.create(PAIR)
        assert shape(instance) == [1, 1] and "has been silent for 2 s" in instance.reason
        assert len(await tokens(nodes[0], a_request())) == 12
        assert len(runners()) == 2


async def test_a_preview_of_a_group_can_be_sent_back(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        shown = await nodes[0].instances.previews(PAIR)
        (entry,) = [one for one in shown if "refused" not in one]
        (stage,) = entry["stages"]
        assert entry["width"] == 2 and len(stage["group"]["peers"]) == 2
        parts = stage["weights_bytes"] + stage["kv_bytes"] + stage["overhead_bytes"]
        assert parts == stage["reserve_bytes"] == stage["usable_bytes"] - stage["headroom_bytes"]
        wish = instance_spec(decode_body(json.dumps(entry["request"]).encode(), InstanceBody))
        instance = await nodes[1].instances.create(wish)
        assert shape(instance) == [2] and instance.stages[0].reserve_bytes == stage["reserve_bytes"]
        plain = await nodes[0].instances.previews(InstanceSpec(MODEL))
        assert all("group" not in stage for one in plain for stage in one.get("stages", ()))


async def test_each_attempt_of_a_group_has_ports_of_its_own(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as (one, two):
        card = await one._models.catalogue.card(MODEL)
        plans = [await one._owning.planner.propose(card, PAIR, "i", Ballot(n, one.node_id)) for n in (1, 2)]
        answers = [
            (await one._hosting.host.reserve(plan, 0)).collective
            + " "
            + (await two._hosting.host.reserve(plan, 0)).collective
            for plan in plans
        ]
        assert len(set(" ".join(answers).split())) == 4
        assert all(endpoint.startswith("127.0.0.1:") for endpoint in " ".join(answers).split())


async def test_an_owner_that_stops_leaves_its_group_to_its_ranks(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3) as nodes:
        others = tuple(node.node_id for node in nodes[1:])
        await nodes[0].instances.create(InstanceSpec(MODEL, groups=(others,), group_backend="ring"))
        await until(
            lambda: all(node._owning.instances.of_model(MODEL) for node in nodes[1:])
        )  # they know that it is ready
        ranks = runners()
        await nodes[0].stop()
        await until(lambda: [owner for owner, _ in nodes[1]._owning.instances.all()] == [min(others)])
        assert runners() == ranks


async def test_a_rank_with_the_wiring_of_another_is_not_started(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as (one, two):
        card = await one._models.catalogue.card(MODEL)
        plan = await one._owning.planner.propose(card, PAIR, "i", Ballot(1, one.node_id))
        host = one._hosting.host if plan.stages[0].peers[1] == one.node_id else two._hosting.host
        assert (await host.reserve(plan, 0)).granted
        for wiring in (None, RankWiring("ring", 0, ("127.0.0.1:1", "127.0.0.1:2"))):
            with pytest.raises(InputError, match="does not fit the rank of this node"):
                await anext(host.commit(plan.instance_id, plan.ballot, wiring=wiring))


@pytest.mark.parametrize("backend", [None, pytest.param("jaccl", marks=pytest.mark.extended)])
async def test_a_group_without_rdma_meets_over_tcp_and_says_so_once(tmp_path: Path, backend: Any) -> None:
    async with mesh(tmp_path, 2) as nodes:
        wish = InstanceSpec(MODEL, tensor_group=2, group_backend=backend)
        instance = await nodes[0].instances.create(wish)
        assert [stage.group.backend for stage in instance.stages] == ["ring"]
        assert instance.reason.count("over TCP") == 1 and "macOS 26.2" in instance.reason
        assert (await nodes[0].instances.create(wish)).digest == instance.digest
        shown = await nodes[0].instances.preview(wish)
        assert shown["note"] == instance.reason


async def test_a_group_that_cannot_be_is_refused_and_says_what_would_help(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        with pytest.raises(PlacementError, match="a tensor group of 3 was asked for, and 2 can take part"):
            await nodes[0].instances.create(InstanceSpec(MODEL, tensor_group=3, group_backend="ring"))


async def test_a_group_waits_for_a_peer_that_is_gone_but_for_none_that_is_kept_out(tmp_path: Path) -> None:
    wish = InstanceSpec(MODEL, tensor_group=3, group_backend="ring")
    async with mesh(tmp_path, 3) as nodes:
        gone = nodes[2].membership.own
        await crash(nodes[2])
        await until(lambda: [peer.id for peer in nodes[0].membership.gone] == [gone.id])
        with pytest.raises(PlacementError, match=f"with {gone.name} .not reachable now") as refused:
            await nodes[0].instances.create(wish)
        assert refused.value.code == PendingPlacementError.code
        nodes[0].membership._roster.note_refusal(gone.name, "another secret", peer_id=gone.id)
        with pytest.raises(PlacementError, match="a tensor group of 3 was asked for, and 2 can take part") as refused:
            await nodes[0].instances.create(wish)
        assert refused.value.code == PlacementError.code and "reachable" not in str(refused.value)


# the parts


GROUP = TensorGroup("ring", ("a", "b"))


def test_troubles_count_per_set_of_peers_and_are_forgotten_in_time() -> None:
    troubles = GroupTroubles()
    assert troubles.note(GROUP, "no cable", 0.0) == 1
    assert not troubles.unfit(1.0)
    assert troubles.note(TensorGroup("ring", ("b", "a")), "no cable", 1.0) == 2, "the order of the ranks is no matter"
    assert "2 times, lastly: no cable" in troubles.unfit(2.0)[frozenset("ab")]
    assert not troubles.unfit(1.0 + tensor_groups.FORGET_S)
    assert troubles.note(GROUP, "no cable", 2 * tensor_groups.FORGET_S) == 1
    troubles.forget(GROUP)
    for number in range(2 * tensor_groups.MAX_SETS):
        troubles.note(TensorGroup("ring", ("x", str(number))), "no cable", 0.0)
    assert len(troubles._troubles) == tensor_groups.MAX_SETS


def test_a_wiring_is_held_against_the_group() -> None:
    right = RankWiring("ring", 1, ("10.0.0.1:7", "10.0.0.2:7"))
    assert wiring_fault(GROUP, 1, right) == ""
    assert wiring_fault(None, 0, None) == ""
    assert wiring_fault(GROUP, 0, right) == "it is for rank 1 of 2 over ring, not for rank 0 of 2"
    assert "missing" in wiring_fault(GROUP, 0, None)
    assert "the stage is not one" in wiring_fault(None, 0, right)
    assert "is not an IPv4 address" in wiring_fault(GROUP, 1, RankWiring("ring", 1, ("10.0.0.1:7", "mac.local:7")))


def test_only_those_listen_whom_others_dial() -> None:
    def where(group: TensorGroup) -> list[str]:
        return [collective_endpoint(group, rank, "me", lambda peer: "127.0.0.1") for rank in range(group.size)]

    assert all(endpoint.startswith("127.0.0.1:") for endpoint in where(GROUP))
    assert [bool(e) for e in where(TensorGroup("jaccl", ("a", "b"), ((None, "d"), ("d", None))))] == [True, False]


async def test_wirings_put_together_what_each_rank_said(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as (one, _):
        card = await one._models.catalogue.card(MODEL)
        plan: Plan = await one._owning.planner.propose(card, PAIR)
        said = {seat: f"127.0.0.1:{seat.rank + 1}" for seat in plan.seats}
        assert [w.rank for w in wirings(plan, said).values()] == [0, 1]
        assert {w.endpoints for w in wirings(plan, said).values()} == {("127.0.0.1:1", "127.0.0.1:2")}


def test_a_wish_for_one_peer_is_a_wish_for_no_group() -> None:
    assert not GroupWish(1).is_forced and GroupWish(2).is_forced and GroupWish(members=(("a", "b"),)).is_forced
