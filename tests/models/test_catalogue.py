"""A model that only another peer has: it can be listed, its texts fetched, and it runs over there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from exo_mesh.errors import MeshError, ModelError
from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.models.catalogue import card_from_json, card_to_json
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
        await until(lambda: "tiny" in [entry.name for entry in guest.models()])
        assert (await guest.model("tiny")).peers == (holder.node_id,)
        texts = await guest.text_files("tiny")
        assert texts.is_relative_to(tmp_path / "b")
        assert (texts / "tokenizer.json").read_bytes() == (tmp_path / "models/tiny/tokenizer.json").read_bytes()
        assert await guest.text_files("tiny") == texts
        assert len(await tokens(guest, a_request(), "tiny")) == 12
        (instance,) = guest.observation.state()["view"]["instances"]
        assert [stage["peer"] for stage in instance["stages"]] == [holder.node_id]
        assert instance["owner"] == guest.node_id
    finally:
        await asyncio.gather(guest.stop(), holder.stop())


async def test_a_model_can_be_named_by_its_directory_on_this_machine(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny", TinyModel(layers=4))
    node = make_node(tmp_path / "a", "n", Machine(), context_limit=256)
    await node.start()
    try:
        instance = await node.create_instance(InstanceSpec(str(tmp_path / "tiny")))
        assert instance["state"] == "ready" and len(await tokens(node, a_request(), str(tmp_path / "tiny"))) == 12
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
