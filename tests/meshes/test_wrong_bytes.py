"""A wrong byte of a file of which each node fetches only a part: found, never served after that, and repaired."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_mesh.domain.plan import Ballot
from exo_mesh.errors import InstanceDeletedError
from exo_mesh.models.downloads import checks
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.weights.safetensors import on_disk
from tests.meshes.test_fetching import MODEL, delete_all, knows, manifest_of, nodes_at
from tests.support.checkpoints import write_checkpoint
from tests.support.hub import LoopbackHub
from tests.support.nodes import a_request, instances, tokens, until

pytestmark = pytest.mark.extended

NAME = "org/tiny"
FILE = "model.safetensors"
SECRET = 32 * "7"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub with one model; checks of parts are tried again soon."""
    monkeypatch.setattr(checks, "FIRST_RETRY_S", 0.2)
    write_checkpoint(tmp_path / "tiny", MODEL)
    with LoopbackHub() as hub:
        hub.add(NAME, tmp_path / "tiny")
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        yield hub


def unverified(nodes: list[Node]) -> set[str]:
    return {node.membership.own.name for node in nodes if NAME in node.membership.own.unverified}


def ballots(node: Node) -> set[Ballot]:
    return {one.ballot for _, one in node.membership.view.records_of_instances()}


async def ready(nodes: list[Node]) -> None:
    await until(lambda: any(one["state"] == "ready" for one in instances(nodes[0])), 30)


async def answer_of_one(a: Node, b: Node) -> list[int]:
    """The answer of node a alone, which then has the whole file."""
    await delete_all(a)
    await until(lambda: not instances(b))
    alone = await a.instances.create(InstanceSpec(NAME, min_peers=1, exclude_peers=(b.node_id,)))
    assert len(alone["stages"]) == 1
    return await tokens(a, a_request("alone", 16), NAME)


@pytest.mark.parametrize("tenth", [pytest.param(one, marks=[pytest.mark.slow] if one % 3 else []) for one in range(10)])
async def test_a_wrong_byte_at_any_tenth_from_the_hub_is_never_served_once_it_is_checked(
    tmp_path: Path, hub: LoopbackHub, tenth: int
) -> None:
    """The hub sends it wrong once, right afterwards."""
    whole = (tmp_path / "tiny" / FILE).read_bytes()
    async with nodes_at(tmp_path, "ab", secret=SECRET) as nodes:
        a, b = nodes
        await a.models.find(NAME, may_download=True)
        await knows(nodes, NAME)
        hub.faults.wrong_at[FILE] = len(whole) * tenth // 10 + len(whole) // 20
        with contextlib.suppress(InstanceDeletedError):  # found after the wait, and placed again by itself
            await a.instances.create(InstanceSpec(NAME, min_peers=2))
        assert not hub.faults.wrong_at, "the wrong byte was sent"
        await until(lambda: not unverified(nodes), 60)
        await ready(nodes)
        served = await tokens(a, a_request("served", 16), NAME)
        for node in "ab":
            held = on_disk(tmp_path / node / "models" / NAME / FILE).read_bytes()
            present = manifest_of(tmp_path, node, NAME).files[FILE].present
            assert present and all(held[start:stop] == whole[start:stop] for start, stop in present)
        assert await answer_of_one(a, b) == served


async def test_a_ring_that_started_before_the_check_says_so_and_is_replaced(
    tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LEAST_WAIT_S", 0.0)
    may_check = asyncio.Event()
    check_once = checks.FileChecks._check_once

    async def later(self: checks.FileChecks, model: str, *, uses_hub: bool) -> tuple[str, ...]:
        await may_check.wait()
        return await check_once(self, model, uses_hub=uses_hub)

    monkeypatch.setattr(checks.FileChecks, "_check_once", later)
    async with nodes_at(tmp_path, "ab", secret=SECRET) as nodes:
        a, b = nodes
        await a.models.find(NAME, may_download=True)
        await knows(nodes, NAME)
        hub.faults.wrong_at[FILE] = (tmp_path / "tiny" / FILE).stat().st_size // 2
        await a.instances.create(InstanceSpec(NAME, min_peers=2))
        assert unverified(nodes) == {"a", "b"} and not hub.faults.wrong_at
        assert "unverified" in str(a._parts.health.describe("ok"))
        (before,) = ballots(a)
        may_check.set()
        await until(lambda: bool(ballots(a)) and min(ballots(a)) > before, 60)
        await until(lambda: not unverified(nodes), 60)
        await ready(nodes)
        served = await tokens(b, a_request("after", 16), NAME)
        assert await answer_of_one(a, b) == served
