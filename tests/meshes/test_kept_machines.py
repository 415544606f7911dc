"""After a restart of all nodes, each prompt finds the KV that they had written, whoever is asked first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from exo_mesh.domain.plan import NO_BALLOT
from exo_mesh.domain.shard import KeptLayers
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import GB, MODEL, a_request, mesh, tokens, until
from tests.support.peers import Peer
from tests.support.peers import mesh as processes
from tests.support.processes import eventually

BLOCK = 64
PROMPT = tuple(np.random.default_rng(3).integers(3, 500, 2100).tolist())


def cut_of(node: Node) -> list[tuple[str, int, int]]:
    ((_, instance),) = node.membership.view.instances()
    return [(stage.peer_id, stage.shard.start, stage.shard.stop) for stage in instance.plan.stages]


def disks(tmp_path: Path, count: int) -> Sequence[dict[str, Any]]:
    return [{"prefix_disk": tmp_path / f"disk-{index}"} for index in range(count)]


def figures(nodes: Sequence[Node]) -> list[Any]:
    """The figures of the prefix cache of each stage, the driver's last."""
    beats = [beat for node in nodes for beat in node._hosting.host.beats()]
    return [beat.beat.prefix for beat in sorted(beats, key=lambda beat: beat.is_driver)]


@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("secret", "num_restarts"),
    [("", 10), ("a-secret-of-the-mesh-with-enough-characters", 2)],
    ids=["open", "closed"],
)
async def test_after_each_restart_the_prompt_is_read_from_disk_whoever_is_asked(
    tmp_path: Path, secret: str, num_restarts: int
) -> None:
    random = np.random.default_rng(1)
    cuts: set[tuple[tuple[str, int, int], ...]] = set()
    texts: set[tuple[int, ...]] = set()
    for start in range(num_restarts + 1):
        usable = tuple(int(random.integers(7 * GB, 9 * GB)) for _ in range(3)) if start else (8 * GB,) * 3
        async with mesh(
            tmp_path, 3, usable_bytes=usable, each=disks(tmp_path, 3), min_peers=3, context_limit=4096, secret=secret
        ) as nodes:
            entry = nodes[start % 3]
            texts.add(tuple(await tokens(entry, a_request(f"r{start}", 4, PROMPT))))
            cuts.add(tuple(cut_of(entry)))
            await until(lambda nodes=nodes: all(one.disk_files for one in figures(nodes)), 60)
            await until(lambda nodes=nodes: figures(nodes)[-1].hits + figures(nodes)[-1].misses)  # reported once a beat
            *_, driver = figures(nodes)
            if start:
                assert driver.disk_hit_tokens >= 0.99 * (len(PROMPT) // BLOCK * BLOCK), f"start {start}"
    assert len(cuts) == 1 and len(texts) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_restarts_of_real_nodes_find_the_prompt_whoever_is_asked(tmp_path: Path) -> None:
    flags = [["--prefix-disk", str(tmp_path / f"disk-{index}"), "--min-peers", "3"] for index in range(3)]
    asked = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 4, "temperature": 0}
    texts: set[str] = set()

    def has_file(peer: Peer) -> bool:
        (stage,) = peer.api.get("/memory", 10)["stages"]
        return bool(stage["prefix_cache"].get("disk", {}).get("files"))

    for start in range(11):
        with processes(tmp_path, flags, engine="numpy") as peers:
            answer = peers[start % 3].api.post("/v1/completions", asked, 200)
            texts.add(answer["choices"][0]["text"])
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= (0.99 * (len(PROMPT) // BLOCK * BLOCK) if start else 0), f"start {start}"
            assert all(eventually(lambda peer=peer: has_file(peer), 60) for peer in peers)  # type: ignore[misc]
    assert len(texts) == 1


async def test_a_node_plans_with_what_others_have_on_disk(tmp_path: Path) -> None:
    """Each node would come first in its own plan; with KV on disks all make the same one."""
    async with mesh(tmp_path, 2, context_limit=1024) as nodes:
        card = await nodes[0]._models.catalogue.card(MODEL)
        spec = InstanceSpec(MODEL, min_peers=2)

        async def plans() -> list[list[tuple[str, int, int]]]:
            made = [
                await one._owning.planner.propose(card, spec, "i", NO_BALLOT.next_for(one.node_id)) for one in nodes
            ]
            return [[(stage.peer_id, stage.shard.start, stage.shard.stop) for stage in plan.stages] for plan in made]

        before = await plans()
        assert before[0] != before[1]
        for node, layers in zip(nodes, ((3, 8), (0, 3)), strict=True):
            kept = ((card.digest[:32], (KeptLayers("dummy", *layers, 2048),)),)
            node.membership.describe(replace(node.membership.own, on_disk=kept))
        await until(lambda: all(len(node._owning.planner._pool.on_disk(card)) == 2 for node in nodes))
        kept_plan = [(nodes[1].node_id, 0, 3), (nodes[0].node_id, 3, 8)]
        assert await plans() == [kept_plan, kept_plan]
