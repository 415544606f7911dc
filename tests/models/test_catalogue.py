"""A model that only another peer has: it can be listed, its texts fetched, and it runs over there."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import MeshError, ModelError, UnknownModelError
from exo_mesh.models import catalogue as catalogue_module
from exo_mesh.models.card_json import card_from_json, card_to_json
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.weights import store as store_module
from exo_mesh.weights.store import ModelStore
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.nodes import MODEL, Machine, a_request, make_node, tokens, until


async def test_any_peer_is_a_way_in_to_a_model_that_it_does_not_have(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models" / "tiny", TinyModel(layers=4))
    holder = make_node(tmp_path / "a", "holder", Machine(), models_dirs=(tmp_path / "models",), context_limit=256)
    await holder.start()
    address = f"127.0.0.1:{holder.grpc_port}"
    guest = make_node(tmp_path / "b", "guest", Machine(), bootstrap_peers=(address,), context_limit=256)
    await guest.start()
    try:
        await until(lambda: "tiny" in [entry.name for entry in guest.models.all()])
        assert (await guest.models.named("tiny")).peers == (holder.node_id,)
        texts = await guest.models.text_files("tiny")
        assert texts.is_relative_to(tmp_path / "b")
        assert (texts / "tokenizer.json").read_bytes() == (tmp_path / "models/tiny/tokenizer.json").read_bytes()
        assert await guest.models.text_files("tiny") == texts
        assert len(await tokens(guest, a_request(), "tiny")) == 12
        (instance,) = guest.observation.state().view.instances
        assert [stage.peer for stage in instance.stages] == [holder.node_id]
        assert instance.owner == guest.node_id
    finally:
        await asyncio.gather(guest.stop(), holder.stop())


@pytest.mark.extended
async def test_two_names_of_one_directory_are_one_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models" / "tiny", TinyModel(layers=4))
    (tmp_path / "models" / "zulu").symlink_to("tiny")
    models_dirs = (tmp_path / "models", tmp_path / "models" / "tiny")
    node = make_node(tmp_path / "a", "n", Machine(), context_limit=256, models_dirs=models_dirs)
    await node.start()
    try:
        assert [entry.name for entry in node.models.all()] == [MODEL, "tiny"]
        instance = await node.instances.create(InstanceSpec("zulu"))
        assert instance.model == "tiny" and (await node.models.named("zulu")).instance_ids == (instance.id,)
        assert await node.models.at(tmp_path / "models" / "zulu") == "tiny"
        with pytest.raises(UnknownModelError):
            await node.instances.create(InstanceSpec(str(tmp_path / "models" / "tiny")))
    finally:
        await node.stop()


def test_a_card_survives_the_trip_and_a_broken_one_is_refused() -> None:
    card = ModelStore(()).card(MODEL)
    assert card_from_json(card_to_json(card)) == card
    text = card_to_json(card)
    nonsense = (
        text.replace(b'"tied":', b'"tied":"'),
        text.replace(b'"context_length":', b'"context_length":-'),
        text.replace(b'"layer_bytes":[', b'"layer_bytes":["x",'),
        text.replace(b'"hidden_size":', b'"hidden_size":1e300,"x":'),
    )
    for broken in (b"", b"[]", b"{}", text[:-20], card_to_json(replace(card, name="x"))[1:], *nonsense):
        assert broken != text
        with pytest.raises((ModelError, MeshError)):
            card_from_json(broken)


async def test_a_model_that_is_unusable_here_is_used_from_a_peer_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for side in ("a", "b"):
        write_checkpoint(tmp_path / side / "models" / "tiny", TinyModel(layers=4))
    broken = tmp_path / "b" / "models" / "tiny" / "config.json"
    broken.write_text("{}")
    holder = make_node(tmp_path / "a/home", "holder", Machine(), models_dirs=(tmp_path / "a/models",))
    await holder.start()
    address = f"127.0.0.1:{holder.grpc_port}"
    guest = make_node(
        tmp_path / "b/home", "guest", Machine(), bootstrap_peers=(address,), models_dirs=(tmp_path / "b/models",)
    )
    await guest.start()
    try:
        catalogue = guest._models.catalogue
        for _ in range(3):
            assert not await catalogue.rescan()
        assert caplog.text.count("cannot be used") == 1
        assert guest.models.unusable() == {"tiny": "tiny: config.json has no usable num_hidden_layers: null"}
        await until(lambda: "tiny" in [entry.name for entry in guest.models.all()])
        assert (await guest.models.named("tiny")).peers == (holder.node_id,)
        assert (await guest.models.text_files("tiny")).is_relative_to(tmp_path / "b" / "home")
        write_checkpoint(tmp_path / "b" / "models" / "tiny", TinyModel(layers=4))
        assert await catalogue.rescan()
        assert guest.models.unusable() == {} and "tiny" in catalogue.local_names
    finally:
        await asyncio.gather(guest.stop(), holder.stop())


async def test_a_slow_look_at_models_does_not_hold_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what was read in time, and the rest as soon as that is read."""
    go_on, read = threading.Event(), store_module.read_card_within_limits

    def slowly(model_dir: Path, name: str) -> ModelCard:
        if name == "slow":
            assert go_on.wait(30)
        return read(model_dir, name)

    monkeypatch.setattr(store_module, "read_card_within_limits", slowly)
    monkeypatch.setattr(catalogue_module, "LOOK_S", 0.05)
    monkeypatch.setattr(catalogue_module, "START_LOOK_S", 0.05)
    for name in ("fast", "slow"):
        write_checkpoint(tmp_path / "models" / name, TinyModel(layers=2))
    node = make_node(tmp_path / "a", "n", Machine(), models_dirs=(tmp_path / "models",))
    await node.start()
    try:
        catalogue = node._models.catalogue
        assert "slow" not in catalogue.local_names
        await until_read(catalogue, "fast")
        go_on.set()
        await until_read(catalogue, "slow")
    finally:
        go_on.set()
        await node.stop()


async def until_read(catalogue: Catalogue, name: str) -> None:
    async with asyncio.timeout(15):
        while name not in catalogue.local_names:
            await catalogue.rescan()
