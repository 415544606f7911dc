"""Which engine each peer would run a model with: what the request says, then the peer, then what it can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.pinning import Pin
from exo_mesh.engine.registry import providers
from exo_mesh.errors import InputError, PlacementError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.checkpoints import TinyModel, config_json, write_checkpoint, write_json
from tests.support.nodes import MODEL, Machine, knows_all, make_node, until

pytestmark = pytest.mark.skipif(
    not {"mlx", "numpy"} <= {name for name, found in providers().items() if found.availability().available},
    reason="needs two engines that compute",
)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[Node]]:
    """A peer that chooses mlx, except for the demo model, and one that was told to use numpy."""
    write_checkpoint(tmp_path / "models" / "other", TinyModel())
    write_checkpoint(tmp_path / "models" / "strange", TinyModel())
    config = {**config_json(TinyModel()), "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    write_json(tmp_path / "models" / "strange" / "config.json", config)
    options: dict[str, Any] = {"models_dirs": (tmp_path / "models",)}
    first = make_node(tmp_path / "a", "a", Machine(), engine="mlx", model_engines={MODEL: "numpy"}, **options)
    await first.start()
    bootstrap = (f"127.0.0.1:{first.grpc_port}",)
    second = make_node(tmp_path / "b", "b", Machine(), engine="numpy", bootstrap_peers=bootstrap, **options)
    await second.start()
    await until(lambda: knows_all(first, 2) and knows_all(second, 2))
    yield [first, second]
    await asyncio.gather(first.stop(), second.stop())


async def chosen(node: Node, spec: InstanceSpec) -> dict[str, tuple[str, ...]]:
    """Engines of each peer by its name, the first choice first."""
    names = {peer.id: peer.name for peer in node.membership.view.peers()}
    card = await node._models.catalogue.card(spec.model)
    candidates = node._owning.planner.candidates(card, spec)
    return {names[candidate.peer_id]: (candidate.engine, *candidate.others) for candidate in candidates}


async def test_a_peer_uses_the_engine_that_was_named_for_the_model_or_for_itself(nodes: list[Node]) -> None:
    for node in nodes:  # each knows it of the other
        assert await chosen(node, InstanceSpec(MODEL)) == {"a": ("numpy", "mlx"), "b": ("numpy",)}
        assert await chosen(node, InstanceSpec("other")) == {"a": ("mlx",), "b": ("numpy",)}


async def test_what_the_named_engine_cannot_run_goes_to_the_next(nodes: list[Node]) -> None:
    for node in nodes:
        found = await chosen(node, InstanceSpec("strange"))
        assert found["a"] == ("mlx",) and found["b"][0] != "numpy" and "mlx" in found["b"]


async def test_a_request_can_prefer_engines_by_name_or_tag_or_insist(nodes: list[Node]) -> None:
    for wanted in ("mlx", "mlx-cpu"):
        found = await chosen(nodes[1], InstanceSpec(MODEL, engine_preference=("torch-cuda", wanted)))
        assert found == {"a": ("mlx", "numpy"), "b": ("numpy",)}
    assert await chosen(nodes[0], InstanceSpec(MODEL, engine="dummy")) == {"a": ("dummy",), "b": ("dummy",)}
    pins = (Pin(nodes[0].node_id, 0, 3, "dummy"), Pin(nodes[1].node_id, 3, 8))
    assert await chosen(nodes[0], InstanceSpec(MODEL, pins=pins)) == {"a": ("dummy", "numpy", "mlx"), "b": ("numpy",)}


async def test_an_engine_that_stands_in_no_mixed_ring_is_refused_there(nodes: list[Node]) -> None:
    pins = (Pin("a", 0, 3, "dummy"), Pin("b", 3, 8))
    with pytest.raises(PlacementError, match="dummy-cpu 1 accepts no activations from another engine") as refused:
        await nodes[0].instances.create(InstanceSpec(MODEL, pins=pins))
    assert refused.value.reason == "mixing"
    with pytest.raises(InputError, match=r'no peer has an engine "none"; engines of the mesh: dummy, .*numpy'):
        await nodes[0].instances.create(InstanceSpec(MODEL, pins=(Pin("a", 0, 3), Pin("b", 3, 8, "none"))))


@pytest.mark.parametrize(
    ("wish", "param"),
    [({"engine": "nope"}, "engine"), ({"engine_preference": ("nope",)}, "engine_preference")],
)
async def test_an_engine_that_does_not_exist_is_refused_by_its_name(
    nodes: list[Node], wish: dict[str, Any], param: str
) -> None:
    with pytest.raises(InputError, match=r'engine "nope"; engines.*dummy.*numpy') as refused:
        await nodes[0].instances.create(InstanceSpec(MODEL, **wish))
    assert refused.value.param == param
