"""A wrong byte of a file of which each node fetches only a part: found, never served after that, and repaired."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from exo_mesh.errors import InstanceDeletedError, MeshError
from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.models.downloads import checks
from exo_mesh.node.node import Node
from exo_mesh.weights.fetched import part_of
from tests.mesh.test_fetching import MODEL, delete_all, knows, manifest_of, nodes_at
from tests.support.checkpoints import write_checkpoint
from tests.support.hub import LoopbackHub
from tests.support.nodes import a_request, instances, tokens, until

pytestmark = pytest.mark.extended

NAME = "org/tiny"
FILE = "model.safetensors"


def unverified(nodes: list[Node]) -> set[str]:
    return {node.membership.own.name for node in nodes if NAME in node.membership.own.unverified}


async def ready(nodes: list[Node]) -> None:
    await until(lambda: any(one["state"] == "ready" for one in instances(nodes[0])), 30)


@pytest.mark.parametrize("tenth", [pytest.param(one, marks=[pytest.mark.slow] if one % 3 else []) for one in range(10)])
async def test_a_wrong_byte_at_any_tenth_from_the_hub_is_never_served_once_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tenth: int
) -> None:
    """The hub sends it wrong once, right afterwards."""
    monkeypatch.setattr(checks, "FIRST_RETRY_S", 0.2)
    model_dir = tmp_path / "tiny"
    write_checkpoint(model_dir, MODEL)
    with LoopbackHub() as hub:
        hub.add(NAME, model_dir)
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "ab", secret=32 * "7") as nodes:
            a, b = nodes
            await a.find_model(NAME, may_download=True)
            await knows(nodes, NAME)
            size = (model_dir / FILE).stat().st_size
            hub.faults.wrong_at[FILE] = size * tenth // 10 + size // 20
            with contextlib.suppress(InstanceDeletedError):  # found after the wait, and placed again by itself
                await a.create_instance(InstanceSpec(NAME, min_peers=2))
            await until(lambda: not unverified(nodes), 60)
            await ready(nodes)
            served = await tokens(a, a_request("served", 16), NAME)
            for node in "ab":
                part, manifest = part_of(tmp_path / node / "models" / NAME, FILE), manifest_of(tmp_path, node, NAME)
                held, whole = part.read_bytes(), (model_dir / FILE).read_bytes()
                assert all(held[start:stop] == whole[start:stop] for start, stop in manifest.files[FILE].present)
            await delete_all(a)
            await until(lambda: not instances(b))
            alone = await a.create_instance(InstanceSpec(NAME, min_peers=1, exclude_peers=(b.node_id,)))
            assert len(alone["stages"]) == 1
            assert await tokens(a, a_request("alone", 16), NAME) == served


async def test_a_ring_that_started_before_the_check_says_so_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LEAST_WAIT_S", 0.0)
    monkeypatch.setattr(checks, "FIRST_RETRY_S", 0.2)
    checked = asyncio.Event()
    check_once = checks.FileChecks._check_once

    async def held(self: checks.FileChecks, model: str, *, uses_hub: bool) -> tuple[str, ...]:
        await checked.wait()
        return await check_once(self, model, uses_hub=uses_hub)

    monkeypatch.setattr(checks.FileChecks, "_check_once", held)
    model_dir = tmp_path / "tiny"
    write_checkpoint(model_dir, MODEL)
    with LoopbackHub() as hub:
        hub.add(NAME, model_dir)
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "ab", secret=32 * "8") as nodes:
            a, b = nodes
            await a.find_model(NAME, may_download=True)
            await knows(nodes, NAME)
            hub.faults.wrong_at[FILE] = (model_dir / FILE).stat().st_size // 2
            await a.create_instance(InstanceSpec(NAME, min_peers=2))
            assert unverified(nodes) == {"a", "b"}
            assert "unverified" in str(a._parts.health.describe("ok"))
            long = asyncio.ensure_future(tokens(a, a_request("long", 4000), NAME))
            checked.set()
            with pytest.raises(MeshError):
                await long
            await until(lambda: not unverified(nodes), 60)
            await ready(nodes)
            assert len(await tokens(b, a_request("after", 16), NAME)) == 16
