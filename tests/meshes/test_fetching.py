"""A model whose files few peers have runs over many: each fetches what its layers need, and each byte once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from exo_mesh.domain.download import DownloadState
from exo_mesh.errors import FetchError, ModelError, NotFetchedError, OpenMeshError, UnknownModelError
from exo_mesh.models import wiring
from exo_mesh.models.calls import INTRODUCE, PULL
from exo_mesh.models.cards.toml_card import RuntimeSection, TomlCard, VisionSection
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.weights.fetched import Manifest, read_manifest
from exo_mesh.wire.proto import control_pb2 as pb
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.hub import LoopbackHub
from tests.support.nodes import GB, Machine, a_request, crash, instances, make_node, mesh, tokens, until

pytestmark = pytest.mark.extended

MODEL = TinyModel(layers=6, hidden=128)


@asynccontextmanager
async def nodes_at(
    root: Path,
    names: str,
    *,
    holder_dir: Path | None = None,
    engine: str = "numpy",
    secret: str = "",
    open_admin: bool = False,
) -> AsyncIterator[list[Node]]:
    """Nodes that all know each other; the first one has the models in holder_dir."""
    nodes: list[Node] = []
    try:
        for name in names:
            bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",) if nodes else ()
            dirs = (holder_dir,) if holder_dir and not nodes else ()
            node = make_node(
                root / name,
                name,
                Machine(),
                engine=engine,
                context_limit=256,
                bootstrap_peers=bootstrap,
                models_dirs=dirs,
                secret=secret,
                open_admin=open_admin,
            )
            nodes.append(node)
            await node.start()
        await until(lambda: all(len(node.membership.telemetry) == len(names) for node in nodes))
        yield nodes
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


async def knows(nodes: list[Node], model: str) -> None:
    await until(lambda: all(model in {entry.name for entry in node.models.all()} for node in nodes))


def manifest_of(root: Path, name: str, model: str) -> Manifest:
    manifest = read_manifest(root / name / "models" / model)
    assert manifest is not None
    return manifest


async def delete_all(node: Node) -> None:
    for instance in instances(node):
        await node.instances.delete(instance.id)


async def test_a_ring_and_its_spare_fetch_from_the_one_peer_that_has_the_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models" / "tiny", MODEL)
    async with nodes_at(tmp_path, "abcd", holder_dir=tmp_path / "models", secret=32 * "5") as nodes:
        a, b, c, d = nodes
        await knows(nodes, "tiny")
        alone = await tokens(a, a_request("alone", 24), "tiny")
        await delete_all(a)
        placed = await b.instances.create(InstanceSpec("tiny", min_peers=3, exclude_peers=(d.node_id,)))
        assert {stage.peer for stage in placed.stages} == {a.node_id, b.node_id, c.node_id}
        assert await tokens(c, a_request("wide", 24), "tiny") == alone
        assert not (tmp_path / "d" / "models" / "tiny").exists()
        assert all(not manifest_of(tmp_path, name, "tiny").is_whole for name in "bc")
        lost = next(stage for stage in placed.stages if stage.peer == c.node_id)
        await crash(c)
        os.kill(lost.pid, signal.SIGKILL)
        await until(lambda: d.node_id in members(b), 30)
        assert await tokens(b, a_request("again", 24), "tiny") == alone
        assert c.node_id not in members(b) and len(members(b)) == 3
        completed = {b.node_id: DownloadState.COMPLETED, d.node_id: DownloadState.COMPLETED}
        await until(lambda: completed.items() <= {one.peer_id: one.state for one in a.models.downloads()}.items())
        for entry in a.models.downloads():
            assert entry.from_hub_bytes == 0
            assert 0 < entry.from_peers_bytes <= entry.total_bytes


def members(node: Node) -> set[str]:
    ready = [instance for instance in instances(node) if instance.state == "ready"]
    return {stage.peer for instance in ready for stage in instance.stages}


async def test_a_mesh_fetches_each_byte_from_the_hub_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tmp_path / "tiny"
    write_checkpoint(model_dir, MODEL)
    weights = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    with LoopbackHub() as hub:
        hub.add("org/tiny", model_dir)
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "abc") as nodes:
            a, b, c = nodes
            with pytest.raises(UnknownModelError):
                await a.models.find("org/tiny", may_download=False)
            with pytest.raises(NotFetchedError, match=r"no peer has the files of Qwen/Qwen3-0.6B"):
                await a.models.find("qwen3:0.6b", may_download=False)
            assert (await a.models.find("org/tiny", may_download=True)).name == "org/tiny"
            await knows(nodes, "org/tiny")
            placed = await a.instances.create(InstanceSpec("org/tiny", min_peers=3))
            assert len({stage.peer for stage in placed.stages}) == 3
            wide = await tokens(b, a_request("wide"), "org/tiny")
            assert hub.sent_of(".safetensors") <= 1.02 * weights
            for name in "abc":
                assert manifest_of(tmp_path, name, "org/tiny").present_bytes < 0.7 * weights
            # whatever is asked for now comes from the peers
            before = hub.sent_bytes
            await c.models.start_download("org/tiny", whole=True)
            await until(lambda: is_fetched(tmp_path, "c", "org/tiny"))
            await delete_all(a)
            await until(lambda: "org/tiny" in c.membership.own.models)
            assert await tokens(c, a_request("alone"), "org/tiny") == wide
            assert [stage.peer for one in instances(c) for stage in one.stages] == [c.node_id]
            assert hub.sent_bytes == before


async def test_two_peers_that_pull_the_same_at_once_take_it_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = write_checkpoint(tmp_path / "tiny", TinyModel(layers=6, hidden=512, shards=4), repeat=True)
    weights = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    with LoopbackHub() as hub:
        hub.add("org/tiny", model_dir)
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "ab", engine="dummy") as (a, b):
            await a.models.find("org/tiny", may_download=True)
            await knows([a, b], "org/tiny")
            hub.faults.pause_s = 0.01
            hub.faults.hold.set()
            await asyncio.gather(
                *(node.models.start_download("org/tiny", peers=[node.node_id], whole=True) for node in (a, b))
            )
            jobs = [job for node in (a, b) for job in node._models.downloads.jobs.running]
            await until(lambda: len(jobs) == 2 and all(job.elsewhere for job in jobs))
            hub.faults.hold.clear()
            for name in "ab":
                await until(lambda name=name: is_fetched(tmp_path, name, "org/tiny"), 30)  # type: ignore[misc]
            assert hub.sent_of(".safetensors") <= 1.1 * weights, hub.sent


def is_fetched(root: Path, name: str, model: str) -> bool:
    manifest = read_manifest(root / name / "models" / model)
    return manifest is not None and manifest.is_whole


async def test_a_node_that_ends_in_mid_pull_goes_on_by_itself_when_it_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "RESUME_AFTER_S", 0.0)
    model_dir = write_checkpoint(tmp_path / "tiny", TinyModel(layers=6, hidden=512, shards=4), repeat=True)
    with LoopbackHub() as hub:
        hub.add("org/tiny", model_dir)
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "a", engine="dummy") as (a,):
            await a.models.find("org/tiny", may_download=True)
            hub.faults.pause_s = 0.02
            await a.models.start_download("org/tiny", whole=True)
            await until(lambda: manifest_of(tmp_path, "a", "org/tiny").present_bytes > 2_000_000)
        had = manifest_of(tmp_path, "a", "org/tiny").present_bytes
        assert not is_fetched(tmp_path, "a", "org/tiny"), "it ended too late"
        async with nodes_at(tmp_path, "a", engine="dummy") as (a,):
            await until(lambda: is_fetched(tmp_path, "a", "org/tiny"), 30)
            (entry,) = a.models.downloads()
            assert entry.from_hub_bytes <= entry.total_bytes - had + 1_000_000, "in a crash, what came last is lost"


async def test_a_pull_brings_what_the_card_names_besides_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = write_checkpoint(tmp_path / "tiny", TinyModel(layers=2))
    with LoopbackHub() as hub:
        for name in ("org/tiny", "org/small"):
            hub.add(name, model_dir)
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "a", engine="dummy") as (a,):
            shelf = a._models.shelf
            runtime = RuntimeSection(assistant_model_repo="org/small", mtp_sidecar_repo="org/none")
            await shelf.add_card(TomlCard(id="org/tiny", runtime=runtime))
            await a.models.start_download("org/tiny")
            await until(lambda: is_completed(a, a, "org/tiny") and is_completed(a, a, "org/small"))
            assert "org/none (runtime.mtp_sidecar_repo of the card of org/tiny) cannot be downloaded" in caplog.text
            await a.models.delete("org/tiny")
            await shelf.add_card(TomlCard(id="org/tiny", vision=VisionSection(weights_repo="org/none")))
            with pytest.raises(FetchError, match=r"org/none \(vision.weights_repo of the card of org/tiny\) cannot be"):
                await a.models.start_download("org/tiny")
            assert hub.sent["org/tiny/model.safetensors"] < 1.5 * (model_dir / "model.safetensors").stat().st_size


@pytest.mark.parametrize("usable_bytes", [1000, 8 * GB])
async def test_a_pull_of_an_architecture_that_no_engine_runs_is_refused_for_that_and_not_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable_bytes: int
) -> None:
    model_dir = write_checkpoint(tmp_path / "tiny", TinyModel(layers=2))
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "model_type": "no_such_thing"}))
    with LoopbackHub() as hub:
        hub.add("org/tiny", model_dir)
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with mesh(tmp_path, 1, engine="numpy", usable_bytes=(usable_bytes,)) as (a,):
            refusal = r"no peer can run org/tiny \(no_such_thing\): numpy: .* not supported by the numpy engine"
            with pytest.raises(ModelError, match=refusal):
                await a.models.start_download("org/tiny")
            with pytest.raises(ModelError, match=refusal):
                await a.instances.create(InstanceSpec("org/tiny"))
            assert not a.models.downloads() and not instances(a)


async def test_a_peer_that_cannot_fetch_is_left_out_of_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "models" / "tiny", TinyModel(layers=4))
    async with nodes_at(tmp_path, "abc", holder_dir=tmp_path / "models", engine="dummy") as nodes:
        a, b, c = nodes
        await knows(nodes, "tiny")
        for node in (b, c):
            monkeypatch.setattr(node._models.downloads.room, "make", partial(no_room, node.settings.name))
        with pytest.raises(FetchError, match=r"no room at [bc]") as caught:
            await a.instances.create(InstanceSpec("tiny", min_peers=2))
        assert caught.value.remedy == "make room" and not instances(a)
        failed = {b.node_id: DownloadState.FAILED, c.node_id: DownloadState.FAILED}
        await until(lambda: {entry.peer_id: entry.state for entry in a.models.downloads()} == failed)
        await until(lambda: "download_failed" in {one.code for one in b.observation.health().reasons})
        monkeypatch.undo()
        placed = await a.instances.create(InstanceSpec("tiny", min_peers=2))
        assert len(placed.stages) == 2


async def no_room(where: str, model: str, num_bytes: int) -> None:
    raise FetchError(f"no room at {where}", remedy="make room", is_final=True)


async def test_in_an_open_mesh_only_the_node_that_a_person_asks_uses_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "tiny", TinyModel(layers=4, shards=2))
    with LoopbackHub() as hub:
        for name in ("org/tiny", "org/other"):
            hub.add(name, tmp_path / "tiny")
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "ab", engine="dummy") as (a, b):
            await a.models.start_download("org/tiny", peers=["b"])
            await until(lambda: is_completed(a, a, "org/tiny") and is_completed(a, b, "org/tiny"), 30)
            assert {one.peer_name: one.from_hub_bytes > 0 for one in a.models.downloads()} == {"a": True, "b": False}
            with pytest.raises(OpenMeshError, match=r"deleted at a, not at b: .*type `exo-mesh rm MODEL`"):
                await a.models.delete("org/tiny")
            assert await b.models.delete("org/tiny")
            await a.models.find("org/other", may_download=True)
            stranger = a.membership.client_at(f"127.0.0.1:{b.grpc_port}")
            with pytest.raises(OpenMeshError, match=r"b downloads org/tiny from the hub for no peer; type"):
                await stranger.call(INTRODUCE, pb.IntroduceRequest(model="org/tiny", repo="org/tiny", revision="main"))
            card = await a._models.catalogue.card("org/other")
            await stranger.call(INTRODUCE, pb.IntroduceRequest(model="org/other", model_digest=card.digest))
            sent = hub.sent_bytes
            await stranger.call(
                PULL,
                pb.PullRequest(
                    model="org/other", model_digest=card.digest, wants=[pb.PeerLayers(peer=b.node_id, whole=True)]
                ),
            )
            await until(
                lambda: (
                    [one.state for one in b.models.downloads() if one.model == "org/other"] == [DownloadState.FAILED]
                ),
                30,
            )
            assert hub.sent_bytes == sent and not await asyncio.to_thread(b._models.downloads._files.unfinished_pulls)
            await stranger.close()


async def test_one_quantisation_of_a_gguf_repository_is_pulled_to_the_peers_that_are_named_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "gguf"
    repo.mkdir()
    for quant in ("Q4_K_M", "Q8_0"):
        (repo / f"tiny-{quant}.gguf").write_bytes(b"GGUF" + quant.encode() * 1000)
    with LoopbackHub() as hub:
        hub.add("org/tiny-GGUF", repo)
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        async with nodes_at(tmp_path, "ab", engine="dummy", open_admin=True) as (a, b):
            with pytest.raises(ModelError, match="GGUF"):
                await a.models.find("org/tiny-GGUF:Q4_K_M", may_download=True)
            (begun,) = await a.models.start_download("org/tiny-GGUF:Q4_K_M", peers=["b"])
            model = "org/tiny-GGUF-Q4_K_M"
            assert (begun.model, begun.peer_name) == (model, "b"), "also if nothing was heard of it yet"
            await until(lambda: is_completed(a, b, model))
            assert not (tmp_path / "a" / "models" / model).exists()
            (entry,) = a.models.downloads()
            assert entry.is_whole and entry.from_hub_bytes == entry.total_bytes
            await a.models.start_download("org/tiny-GGUF:Q4_K_M")
            await until(lambda: is_completed(a, a, model))
            (entry,) = (one for one in a.models.downloads() if one.peer_id == a.node_id)
            assert (entry.from_hub_bytes, entry.from_peers_bytes) == (0, entry.total_bytes), "the other peer has it"
            for name in "ab":
                target = tmp_path / name / "models" / model
                assert (target / "tiny-Q4_K_M.gguf").read_bytes() == (repo / "tiny-Q4_K_M.gguf").read_bytes()
                assert not (target / "tiny-Q8_0.gguf").exists()
            freed = await a.models.delete("org/tiny-GGUF:q4_k_m")
            assert freed.keys() == {a.node_id, b.node_id} and not target.exists()
            assert all(7000 <= num_bytes < 100_000 for num_bytes in freed.values())


def is_completed(seen_at: Node, peer: Node, model: str) -> bool:
    states = {(one.peer_id, one.model): one.state for one in seen_at.models.downloads()}
    return states.get((peer.node_id, model)) is DownloadState.COMPLETED
