"""A wrong byte of a file of which each node fetches only a part: found, never served after that, and repaired."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from exo_mesh.domain.plan import Ballot
from exo_mesh.errors import FetchError
from exo_mesh.models.downloads import checks
from exo_mesh.models.file_server import answering
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.weights.safetensors import on_disk
from tests.meshes.test_fetching import MODEL, delete_all, knows, manifest_of, nodes_at
from tests.support.checkpoints import write_checkpoint
from tests.support.hub import LoopbackHub, Refusal
from tests.support.nodes import Machine, a_request, instances, make_node, tokens, until

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
    await until(lambda: any(one.state == "ready" for one in instances(nodes[0])), 30)


async def answer_of_one(a: Node, *others: Node) -> list[int]:
    """The answer of node a alone, which then has the whole file."""
    await delete_all(a)
    await until(lambda: not any(map(instances, others)))
    alone = await a.instances.create(InstanceSpec(NAME, exclude_peers=tuple(one.node_id for one in others)))
    assert len(alone.stages) == 1
    return await tokens(a, a_request("alone", 16), NAME)


TENTHS = [pytest.param(one, marks=[pytest.mark.slow] if one % 5 else []) for one in range(10)]


def present_bytes(root: Path, node: str) -> dict[tuple[int, int], bytes]:
    """What a node has of the file, by span, as its manifest says."""
    present = manifest_of(root, node, NAME).files[FILE].present  # first: what is replaced meanwhile is then right
    held = on_disk(root / node / "models" / NAME / FILE).read_bytes()
    return {(start, stop): held[start:stop] for start, stop in present}


def is_right(root: Path, node: str) -> bool:
    whole = (root / "tiny" / FILE).read_bytes()
    return all(content == whole[start:stop] for (start, stop), content in present_bytes(root, node).items())


@asynccontextmanager
async def no_unmarked_service(root: Path, nodes: list[Node]) -> AsyncIterator[None]:
    """Fails if a ring is ready on wrong bytes of a node that does not say that they are unchecked."""
    names = {node.node_id: node.membership.own.name for node in nodes}
    found: list[str] = []

    async def watch() -> None:
        while True:
            ready = [one for one in instances(nodes[0]) if one.state == "ready" and one.model == NAME]
            serving = {names[peer] for one in ready for stage in one.stages for peer in stage.peers}
            marked = unverified(nodes)
            found.extend(one for one in serving - marked if not is_right(root, one))
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait((watcher,))
    assert watcher.cancelled() and not found, f"served unmarked at {set(found)}"


def alter(root: Path, node: str, position: int) -> None:
    """Changes a byte of the whole file of a node behind its back."""
    file = root / node / "models" / NAME / FILE
    content = bytearray(file.read_bytes())
    content[position] ^= 0x40
    file.write_bytes(content)


def silence(hub: LoopbackHub) -> None:
    """From now on the hub answers nothing."""
    hub.faults.refusals.append(Refusal(HTTPStatus.NOT_FOUND, times=10**6))


async def fetch_whole(root: Path, nodes: list[Node], names: str) -> None:
    """Fetches the whole file to the nodes of these names, from the hub and each other."""
    await nodes[0].models.find(NAME, may_download=True)
    await knows(nodes, NAME)
    for node in nodes:
        if (name := node.membership.own.name) in names:
            await nodes[0].models.start_download(NAME, peers=[node.node_id], whole=True)
            await until(lambda name=name: is_whole(root, name), 30)  # type: ignore[misc]


def is_whole(root: Path, node: str) -> bool:
    return (root / node / "models" / NAME / FILE).exists()


@pytest.mark.parametrize("tenth", TENTHS)
async def test_a_wrong_byte_at_any_tenth_from_a_peer_is_never_served_unmarked_and_is_taken_from_the_hub(
    tmp_path: Path, hub: LoopbackHub, caplog: pytest.LogCaptureFixture, tenth: int
) -> None:
    size = (tmp_path / "tiny" / FILE).stat().st_size
    async with nodes_at(tmp_path, "abc", secret=SECRET) as nodes:
        a, b, c = nodes
        await fetch_whole(tmp_path, nodes, "c")
        alter(tmp_path, "c", size * tenth // 10 + size // 20)
        async with no_unmarked_service(tmp_path, nodes):
            await a.instances.create(InstanceSpec(NAME, min_peers=2, exclude_peers=(c.node_id,)))
            await until(lambda: not unverified(nodes), 60)
            await ready(nodes)
            served = await tokens(a, a_request("served", 16), NAME)
        assert f"{FILE} of {NAME} does not match its digest" in caplog.text, "the wrong byte arrived"
        assert is_right(tmp_path, "a") and is_right(tmp_path, "b")
        assert await answer_of_one(a, b, c) == served


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["closed", "open"])
@pytest.mark.parametrize("wrong_of_d", [None, 7], ids=["a right peer", "peers that are wrong at different places"])
async def test_without_a_hub_a_wrong_byte_of_a_peer_is_taken_from_other_peers(
    tmp_path: Path, hub: LoopbackHub, wrong_of_d: int | None, secret: str
) -> None:
    """Which of them the nodes read first is not known."""
    size = (tmp_path / "tiny" / FILE).stat().st_size
    async with nodes_at(tmp_path, "abcd", secret=secret, open_admin=not secret) as nodes:
        a, _, c, d = nodes
        await fetch_whole(tmp_path, nodes, "cd")
        silence(hub)
        alter(tmp_path, "c", size * 3 // 10)
        if wrong_of_d is not None:
            alter(tmp_path, "d", size * wrong_of_d // 10)
        async with no_unmarked_service(tmp_path, nodes):
            await a.instances.create(InstanceSpec(NAME, min_peers=2, exclude_peers=(c.node_id, d.node_id)))
            await until(lambda: not unverified(nodes), 60)
            await ready(nodes)
            await tokens(a, a_request("served", 16), NAME)
        assert is_right(tmp_path, "a") and is_right(tmp_path, "b")


async def test_where_no_source_is_right_the_error_says_so_and_nothing_is_served_after_it_was_found(
    tmp_path: Path, hub: LoopbackHub
) -> None:
    size = (tmp_path / "tiny" / FILE).stat().st_size
    async with nodes_at(tmp_path, "abc", secret=SECRET) as nodes:
        a, _, c = nodes
        await fetch_whole(tmp_path, nodes, "c")
        silence(hub)
        alter(tmp_path, "c", size // 2)
        spec = InstanceSpec(NAME, min_peers=2, exclude_peers=(c.node_id,))
        async with no_unmarked_service(tmp_path, nodes):
            with contextlib.suppress(FetchError):  # the check may take longer than the download
                await a.instances.create(spec)
                await until(lambda: not instances(a), 30)
            with pytest.raises(FetchError, match=r"model.safetensors does not match its sha256"):
                await a.instances.create(spec)
            assert not [one for one in instances(a) if one.state == "ready"] and unverified(nodes)


@pytest.mark.parametrize("tenth", TENTHS)
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


@pytest.mark.parametrize(("secret", "most"), [(SECRET, 0.8), ("", 2.1)], ids=["closed", "open"])
async def test_one_node_of_a_closed_ring_reads_the_file_for_all_and_in_an_open_mesh_each_does(
    tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, secret: str, most: float
) -> None:
    """The share of the file that the checks read from peers: with three nodes, what the checker does not have itself,
    or twice the file."""
    sent: list[int] = []
    send = answering.send_span

    def count(sock: socket.socket, stream: BinaryIO, start: int, stop: int, *rest: Any) -> None:
        sent.append(stop - start)
        send(sock, stream, start, stop, *rest)

    monkeypatch.setattr(answering, "send_span", count)
    size = (tmp_path / "tiny" / FILE).stat().st_size
    async with nodes_at(tmp_path, "abc", secret=secret, open_admin=not secret) as nodes:
        await nodes[0].models.find(NAME, may_download=True)
        await knows(nodes, NAME)
        sent.clear()
        await nodes[0].instances.create(InstanceSpec(NAME, min_peers=3))
        await until(lambda: not unverified(nodes), 60)
        assert most / 2 < sum(sent) / size <= most
        for node in "abc":
            file = manifest_of(tmp_path, node, NAME).files[FILE]
            assert not file.is_unverified and bool(file.pieces) is bool(secret)


@pytest.mark.parametrize("holders", ["c", "cd"])
async def test_a_model_without_digests_is_checked_by_two_sources_and_else_stays_marked(
    tmp_path: Path, hub: LoopbackHub, holders: str
) -> None:
    """Only peers have it, in directories that no hub knows."""
    write_checkpoint(tmp_path / "models" / "own", MODEL)
    nodes: list[Node] = []
    async with AsyncExitStack() as stack:
        for name in "abcd":
            known = (f"127.0.0.1:{nodes[0].grpc_port}",) if nodes else ()
            settings = {"engine": "numpy", "context_limit": 256, "bootstrap_peers": known, "secret": SECRET}
            dirs = (tmp_path / "models",) if name in holders else ()
            nodes.append(make_node(tmp_path / name, name, Machine(), models_dirs=dirs, **settings))
            stack.push_async_callback(nodes[-1].stop)
            await nodes[-1].start()
        await until(lambda: all(len(node.membership.telemetry) == len(nodes) for node in nodes))
        await knows(nodes, "own")
        a, b, c, d = nodes
        await a.instances.create(InstanceSpec("own", min_peers=2, exclude_peers=(c.node_id, d.node_id)))
        if holders == "cd":
            await until(lambda: not any("own" in node.membership.own.unverified for node in (a, b)), 30)
        files = [manifest_of(tmp_path, name, "own").files[FILE] for name in "ab"]
        assert [file.sha256 for file in files] == ["", ""]
        assert {file.is_unverified for file in files} == {holders == "c"}
        if holders == "c":
            assert "unverified" in str(a._parts.health.describe("ok"))
        await until(lambda: holders == "c" or "unverified" not in str(a._parts.health.describe("ok")))


async def test_a_whole_file_that_is_altered_behind_the_back_of_a_node_is_repaired_before_a_stage_opens_it(
    tmp_path: Path, hub: LoopbackHub
) -> None:
    async with nodes_at(tmp_path, "a") as (a,):
        await fetch_whole(tmp_path, [a], "a")
        right = await answer_of_one(a)
        await delete_all(a)
        alter(tmp_path, "a", 12_345)
        async with no_unmarked_service(tmp_path, [a]):
            assert await answer_of_one(a) == right
        await until(lambda: not unverified([a]), 30)
        assert is_right(tmp_path, "a")
        await delete_all(a)
        alter(tmp_path, "a", 23_456)
        silence(hub)
        with pytest.raises(FetchError, match=r"source"):
            await a.instances.create(InstanceSpec(NAME))
