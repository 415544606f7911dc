"""A model store: peers stage from its host and ask no hub, and drop their copies when nothing uses them or it does."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain import on_disk
from exo_mesh.errors import InputError, UnknownModelError
from exo_mesh.node.node import Node
from exo_mesh.node.store_service import StoreService
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.weights.fetched import read_manifest
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.hub import LoopbackHub
from tests.support.nodes import Machine, a_request, instances, make_node, tokens, until

pytestmark = pytest.mark.extended

MODEL = TinyModel(layers=6, hidden=128)
FILE = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    write_checkpoint(tmp_path / "tiny", MODEL)
    with LoopbackHub() as made:
        made.add("org/tiny", tmp_path / "tiny")
        for name, value in {**made.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        yield made


@asynccontextmanager
async def started(root: Path, name: str, *others: Node, **settings: Any) -> AsyncIterator[Node]:
    """A node that knows the others; `a` is the store's host."""
    store = {"store": root / "store"} if name == "a" else {}
    bootstrap = tuple(f"127.0.0.1:{other.grpc_port}" for other in others)
    node = make_node(
        root / name,
        name,
        Machine(),
        engine="numpy",
        context_limit=256,
        open_admin=True,  # the store's host downloads and deletes for its peers
        bootstrap_peers=bootstrap,
        **{**store, **settings},
    )
    await node.start()
    try:
        together = [node, *others]
        await until(lambda: all(len(one.membership.telemetry) == len(together) for one in together))
        yield node
    finally:
        await node.stop()


def store_of(node: Node) -> StoreService:
    assert node.store.is_configured
    return node.store


def hashes(model_dir: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in model_dir.glob("*.safetensors")}


async def stored(node: Node) -> None:
    """Wait until a node has heard that the store has all of the model."""
    await until(lambda: any(row["id"] == "org/tiny" and row["whole"] for row in store_of(node).registry()))


async def stage(node: Node) -> None:
    """As a member of a plan does, without an instance."""
    await stored(node)
    card = await node._models.catalogue.card("org/tiny")
    await node._models.downloads.bring(card.name, card.digest, [(0, card.num_layers)])


async def test_a_peer_stages_from_the_store_and_deleting_drops_both_copies(tmp_path: Path, hub: LoopbackHub) -> None:
    write_checkpoint(tmp_path / "store" / "org" / "tiny", MODEL)
    canonical = tmp_path / "store" / "org" / "tiny"
    copy = tmp_path / "b" / "models" / "org" / "tiny"
    async with started(tmp_path, "a") as a:
        async with started(tmp_path, "b", a) as b:
            assert store_of(b).health()["host"] == {"id": a.node_id, "name": "a"}
            await stored(b)
            await b.instances.create(InstanceSpec("org/tiny", exclude_peers=(a.node_id,)))
            assert len(await tokens(b, a_request("staged"), "org/tiny")) == 12
            assert hub.sent_bytes == 0, "everything came from the store"
            assert hashes(copy) == hashes(canonical)
            (row,) = [row for row in store_of(a).registry() if row["id"] == "org/tiny"]
            assert row["staged_at"] == [b.node_id]
            with pytest.raises(InputError, match="in use"):
                await store_of(b).delete("org/tiny")
            await b.instances.delete(instances(b)[0].id)
            await until(lambda: not instances(a))
            assert copy.exists(), "recent copies are kept"
        # b is away, and returns after the deletion
        assert await store_of(a).delete("org/tiny") and not canonical.exists()
        assert copy.exists()
        async with started(tmp_path, "b", a):
            await until(lambda: not copy.exists(), 5)
        assert not await store_of(a).delete("org/tiny")


async def test_all_staged_copies_go_within_seconds_of_a_deletion(tmp_path: Path, hub: LoopbackHub) -> None:
    write_checkpoint(tmp_path / "store" / "org" / "tiny", MODEL)
    async with started(tmp_path, "a") as a, started(tmp_path, "b", a) as b:
        await stage(b)
        await until(a.models.downloads)
        assert await store_of(b).delete("org/tiny")
        await until(lambda: not (tmp_path / "b" / "models" / "org").exists() and not a.models.downloads(), 5)
        assert not (tmp_path / "store" / "org").exists() and hub.sent_bytes == 0


async def test_the_store_fetches_for_all_what_it_does_not_have(
    tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "GRACE_S", 0.0)
    (tmp_path / "store").mkdir()
    weights = sum(file.stat().st_size for file in (tmp_path / "tiny").glob("*.safetensors"))
    async with started(tmp_path, "a") as a, started(tmp_path, "b", a, store_keep_gb=0) as b:
        await b.models.find("org/tiny", may_download=True)
        await b.instances.create(InstanceSpec("org/tiny", exclude_peers=(a.node_id,)))
        manifest = read_manifest(tmp_path / "b" / "models" / "org" / "tiny")
        assert manifest is not None and manifest.is_whole
        await until(lambda: "org/tiny" in a.membership.own.models)
        assert hashes(tmp_path / "store" / "org" / "tiny") == hashes(tmp_path / "tiny")
        assert hub.sent_of(".safetensors") <= 1.02 * weights
        assert {one.from_hub_bytes for one in b.models.downloads() if one.peer_id == b.node_id} == {0}
        await b.instances.delete(instances(b)[0].id)
        await until(lambda: not (tmp_path / "b" / "models" / "org").exists())
        assert (tmp_path / "store" / "org" / "tiny" / FILE).exists()


async def test_without_fallback_only_who_asks_the_store_makes_it_fetch(tmp_path: Path, hub: LoopbackHub) -> None:
    (tmp_path / "store").mkdir()
    async with started(tmp_path, "a") as a, started(tmp_path, "b", a, store_fallback=False) as b:
        with pytest.raises(UnknownModelError):
            await b.models.find("org/tiny", may_download=True)
        assert hub.sent_bytes == 0
        await store_of(b).start("org/tiny")
        await until(lambda: store_of(b).downloads("org/tiny"))
        (entry,) = store_of(b).downloads()
        assert entry.peer_id == a.node_id and entry.is_whole
        await stage(b)
        assert (tmp_path / "b" / "models" / "org" / "tiny" / FILE).exists()
        assert await store_of(a).purge(()) == [b.node_id] and await a.models.delete("org/tiny") == {}
        assert (tmp_path / "store" / "org" / "tiny" / FILE).exists(), "who deletes a model means not the store"
        assert not (tmp_path / "b" / "models" / "org").exists()
