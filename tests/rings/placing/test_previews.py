"""What could be placed, with the arithmetic; and what is then placed is what was shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.engine_speed import DIGEST_CHARS, FRAME_S, EngineSpeed, ForwardCost
from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.pinning import Pin
from exo_mesh.errors import InputError, PlacementError
from exo_mesh.rings.placing.previews import with_peer_ids
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.nodes import GB, MODEL, instances, mesh, until


async def test_every_width_is_shown_with_its_arithmetic(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3) as nodes:
        shown = await nodes[1].instances.previews(InstanceSpec(MODEL))
        assert [entry["width"] for entry in shown] == [1, 2, 3]
        assert shown[0]["policies"] == ["memory", "latency"], "unmeasured, latency is as memory"
        assert shown[2]["policies"] == ["memory", "latency", "throughput"]
        for entry in shown:
            layers = [layer for stage in entry["stages"] for layer in range(*stage["layers"])]
            assert layers == list(range(8))
            assert entry["context_limit"] == 2048
            assert entry["kv_pool_tokens"] == {1: 16384}.get(entry["width"], 32768), "peers have room for more pools"
            for stage in entry["stages"]:
                parts = stage["weights_bytes"] + stage["kv_bytes"] + stage["overhead_bytes"]
                assert stage["overhead_bytes"] == ENGINE_OVERHEAD_BYTES
                assert parts == stage["reserve_bytes"] == stage["usable_bytes"] - stage["headroom_bytes"]


async def test_a_preview_can_be_placed_as_it_was_shown(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3) as nodes:
        shown = (await nodes[0].instances.previews(InstanceSpec(MODEL)))[1]
        pins = [Pin(s["peer"], *s["layers"], s["engine"], s["reserve_bytes"]) for s in shown["stages"]]
        placed = await nodes[2].instances.create(InstanceSpec(MODEL, pins=tuple(pins)))
        assert [(s.peer, s.layers) for s in placed.stages] == [(s["peer"], tuple(s["layers"])) for s in shown["stages"]]
        assert placed.policy == "pinned" and placed == await nodes[2].instances.create(
            InstanceSpec(MODEL, pins=tuple(pins))
        )


async def test_a_preview_for_an_engine_that_holds_other_bytes_than_the_files_can_be_placed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models" / "tiny", TinyModel(layers=2, dtype="bfloat16"))
    async with mesh(tmp_path, 1, engine="numpy", models_dirs=(tmp_path / "models",)) as (node,):
        (shown,) = await node.instances.previews(InstanceSpec("tiny"))
        card = await node._models.catalogue.card("tiny")
        assert shown["stages"][0]["weights_bytes"] > 1.5 * card.shard_bytes(0, 2), "NumPy computes in float32"
        pins = tuple(Pin(s["peer"], *s["layers"], s["engine"], s["reserve_bytes"]) for s in shown["stages"])
        stale = (replace(pins[0], reserve_bytes=card.shard_bytes(0, 2)),)
        with pytest.raises(PlacementError, match="memory has changed since the preview"):
            await node.instances.create(InstanceSpec("tiny", pins=stale))
        placed = await node.instances.create(InstanceSpec("tiny", pins=pins))
        assert placed.stages[0].reserve_bytes == shown["stages"][0]["reserve_bytes"]


async def test_layers_can_be_pinned_by_the_names_of_peers(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        pins = (Pin("n1", 0, 3), Pin("n0", 3, 8))
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, pins=pins))
        assert [(s.peer, s.layers) for s in placed.stages] == [
            (nodes[1].node_id, (0, 3)),
            (nodes[0].node_id, (3, 8)),
        ]
        with pytest.raises(InputError, match='no peer is called "n7"; known peers: "n0" '):
            await nodes[0].instances.create(InstanceSpec(MODEL, pins=(Pin("n7", 0, 8),)))
        with pytest.raises(InputError, match="layer 3 must come next"):
            await nodes[0].instances.create(InstanceSpec(MODEL, pins=(Pin("n1", 0, 3), Pin("n0", 4, 8))))


def test_the_peer_of_a_stage_leads_its_group_by_whatever_name() -> None:
    names = {"01234567": "a", "abcdef": "b"}
    peers = [PeerInfo(peer_id, 1, name, "0.1", 1, "default", ()) for peer_id, name in names.items()]
    spec = with_peer_ids(InstanceSpec(MODEL, pins=(Pin("a", 0, 8, group=("0123", "b")),)), peers)
    assert spec.pins == (Pin("01234567", 0, 8, group=("01234567", "abcdef")),)
    with pytest.raises(InputError, match='the peer of a stage must come first in its group, but "b" does not'):
        with_peer_ids(InstanceSpec(MODEL, pins=(Pin("b", 0, 8, group=("a", "b")),)), peers)


async def test_a_peer_can_be_excluded_by_its_name(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, exclude_peers=("n0",)))
        assert [stage.peer for stage in placed.stages] == [nodes[1].node_id]


async def test_what_is_not_possible_says_why_with_numbers(tmp_path: Path) -> None:
    tight = (295_000_000, 295_000_000)
    async with mesh(tmp_path, 2, usable_bytes=tight, context_limit=8192) as nodes:
        one, two = await nodes[0].instances.previews(InstanceSpec(MODEL))
        assert one["width"] == 1 and one["refused"]["reason"] == "memory"
        assert one["refused"]["need_bytes"] > one["refused"]["have"][0]["usable_bytes"] == 295_000_000
        assert two["width"] == 2 and all(stage["headroom_bytes"] >= 0 for stage in two["stages"])


async def test_a_tight_plan_reserves_and_runs_one_context(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, usable_bytes=(290_000_000,)) as (node,):
        (shown,) = await node.instances.previews(InstanceSpec(MODEL))
        assert shown["kv_pool_tokens"] == 2048
        placed = await node.instances.create(InstanceSpec(MODEL))
        assert placed.kv_pool_tokens == 2048
        assert placed.stages[0].reserve_bytes == shown["stages"][0]["reserve_bytes"]


@pytest.mark.extended
async def test_speeds_are_learnt_and_told(tmp_path: Path) -> None:
    from tests.support.nodes import a_request, tokens

    async with mesh(tmp_path, 2, engine_options={"cost_ms": "5"}) as nodes:
        placed = await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await tokens(nodes[0], a_request(max_tokens=160))
        driver = placed.stages[-1].peer

        def learnt() -> bool:
            readings = nodes[0].membership.telemetry
            return all("dummy" in reading.s_per_gb for reading in readings.values())

        await until(learnt)
        weights = (await nodes[0].instances.previews(InstanceSpec(MODEL)))[1]["stages"][0]["weights_bytes"]
        measured = nodes[0].membership.telemetry[nodes[0].node_id].s_per_gb["dummy"]
        assert 0.0045 < measured * weights / 1e9 < 0.05, "a step waits 5 ms, or more on a busy machine"
        await until(lambda: nodes[0].membership.telemetry[driver].tokens.get(placed.id) == 160)


async def test_a_refusal_of_a_placement_has_its_numbers(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, usable_bytes=(GB // 10,)) as (node,):
        with pytest.raises(PlacementError) as refused:
            await node.instances.create(InstanceSpec(MODEL))
        assert refused.value.details["reason"] == "memory" and refused.value.have == ((node.node_id, GB // 10),)
        assert not instances(node)


async def test_what_peers_have_measured_is_used_by_all_for_predictions_and_fast_rings(tmp_path: Path) -> None:
    costs = [ForwardCost(0.0, layer_s, 0.02) for layer_s in (0.01, 0.001)]
    async with mesh(tmp_path, 2) as nodes:
        assert all(entry["predicted"] is None for entry in await nodes[0].instances.previews(InstanceSpec(MODEL)))
        digest = (await nodes[0]._models.catalogue.card(MODEL)).digest[:DIGEST_CHARS]
        for node, cost in zip(nodes, costs, strict=True):
            speeds = ((digest, (("dummy", EngineSpeed(cost, cost, cost, 128)),)),)
            node.membership.describe(replace(node.membership.own, engine_speeds=speeds))
        await until(lambda: all(peer.engine_speeds for node in nodes for peer in node.membership.view.peers()))
        for node in nodes:
            shown = await node.instances.previews(InstanceSpec(MODEL))
            fast = next(entry for entry in shown if "latency" in entry["policies"])
            assert [stage["peer"] for stage in fast["stages"]] == [nodes[1].node_id]
            assert fast["predicted"]["tokens_per_s"] == pytest.approx(1 / (8 * 0.001 + 0.02 + FRAME_S), rel=0.001)
            assert fast["predicted"]["ttft_s"] == pytest.approx(0.028 + 0.028 + FRAME_S, rel=0.01)
            wide = next(entry for entry in shown if entry["width"] == 2)
            assert wide["predicted"]["tokens_per_s"] < fast["predicted"]["tokens_per_s"]
