"""A model whose files one peer has runs over all of them: each fetches what its layers need, and each byte once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.node.node import Node
from exo_mesh.weights.fetched import read_manifest
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.nodes import Machine, a_request, make_node, tokens, until

LAYERS = 6


def a_node(home: Path, first: Node | None = None, *, usable_bytes: int = 8 * 10**9, **settings: object) -> Node:
    bootstrap = (f"127.0.0.1:{first.grpc_port}",) if first else ()
    return make_node(
        home, home.name, Machine(usable_bytes), engine="numpy", context_limit=256, bootstrap_peers=bootstrap, **settings
    )


def knows_all(node: Node, count: int) -> bool:
    return len(node.membership.telemetry) == count and "tiny" in {entry.name for entry in node.models()}


async def test_a_ring_fetches_from_the_one_peer_that_has_the_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models" / "tiny", TinyModel(layers=LAYERS))
    holder = a_node(tmp_path / "a", models_dirs=(tmp_path / "models",))
    await holder.start()
    nodes = [holder, *(a_node(tmp_path / name, holder) for name in "bc")]
    try:
        await asyncio.gather(*(node.start() for node in nodes[1:]))
        for node in nodes:
            await until(
                lambda node=node: len(node.membership.telemetry) == 3 and "tiny" in {e.name for e in node.models()}
            )  # type: ignore[misc]
        alone = await tokens(holder, a_request("alone"), "tiny")
        for instance in holder.observation.state()["view"]["instances"]:
            await holder.delete_instance(instance["id"])
        placed = await nodes[1].create_instance(InstanceSpec("tiny", min_peers=3))
        assert {stage["peer"] for stage in placed["stages"]} == {node.node_id for node in nodes}
        assert await tokens(nodes[2], a_request("wide"), "tiny") == alone
        for name in "bc":
            manifest = read_manifest(tmp_path / name / "models" / "tiny")
            assert manifest is not None and not manifest.is_whole
        for entry in holder.downloads():
            assert (str(entry.state), entry.from_hub_bytes) == ("completed", 0) and entry.from_peers_bytes > 0
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))
