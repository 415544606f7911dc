"""One model, stages of different engines: the text is that of one engine, and engines that disagree are kept apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.domain.pinning import Pin
from exo_mesh.engine.registry import providers
from exo_mesh.errors import PlacementError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.checkpoints import TinyModel, config_json, write_checkpoint, write_json
from tests.support.nodes import GB, Machine, a_request, knows_all, make_node, tokens, until
from tests.support.peers import MODEL, Peer, mesh, text_of
from tests.support.processes import eventually
from tests.support.questions import MAX_TOKENS, QUESTIONS, SHORT, Reference, ask

pytest.importorskip("mlx.core")

pytestmark = pytest.mark.timeout(400)
"""Engines are imported, asked and tried in processes of their own before the first mixed ring stands."""

PLACE_S = 300.0

MARGINS = {"float32": 1e-3, "bfloat16": 0.1}
"""By dtype of the weights: how far below the best logit the token drawn may be, where logits have unit variance. Only
nearer than this may the two best change places, because engines add in another order."""

FAMILIES = {"llama": TinyModel(layers=6), "qwen2": TinyModel(arch="qwen2", layers=5, dtype="bfloat16")}


def needs(engine: str) -> None:
    found = providers().get(engine)
    if found is None or not found.availability().available:
        pytest.skip(f"engine {engine} cannot run here")


@dataclass(frozen=True)
class Pair:
    """Two peers that chose different engines."""

    mlx: Peer
    other: Peer
    engine: str

    def place(self, **wish: Any) -> dict[str, Any]:
        assert eventually(lambda: not any(peer.instances() for peer in (self.mlx, self.other)))
        instance: dict[str, Any] = self.mlx.api.post("/instance", {"model": MODEL, **wish}, PLACE_S)
        assert eventually(lambda: all(peer.instances() == [instance] for peer in (self.mlx, self.other)))
        return instance

    def delete(self, instance: dict[str, Any]) -> None:
        self.mlx.api.delete(f"/instance/{instance['id']}", 15)


TORCH = pytest.param("torch", marks=pytest.mark.slow)
"""What importing and building its models takes is for the long run."""


@pytest.fixture(scope="module", params=["numpy", TORCH])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    needs(request.param)
    flags = [["--max-memory", "2GB"], ["--max-memory", "2GB", "--engine", request.param]]
    with mesh(tmp_path_factory.mktemp("mixed"), flags) as (first, second):
        yield Pair(first, second, request.param)


@pytest.mark.extended
@pytest.mark.parametrize("mlx_first", [True, False], ids=["mlx first", "mlx last"])
@pytest.mark.parametrize(
    "names",
    [pytest.param(SHORT, id="short"), pytest.param(("long",), id="long", marks=pytest.mark.slow)],
)
def test_greedy_text_is_that_of_mlx_lm(pair: Pair, mlx_first: bool, names: tuple[str, ...], whole: Reference) -> None:
    ring = [(pair.mlx, "mlx"), (pair.other, pair.engine)][:: 1 if mlx_first else -1]
    instance = pair.place(pins={ring[0][0].id: [0, 3], ring[1][0].id: [3, 8]})
    assert [stage["engine"] for stage in instance["stages"]] == [engine for _, engine in ring]
    assert instance["activation_dtype"] == "float32"
    for name in names:
        answer = ask(pair.other, QUESTIONS[name][0])
        assert (name, answer.text, answer.tokens) == (name, whole[name].text, whole[name].tokens)
        assert answer.logprobs == pytest.approx(whole[name].logprobs, abs=1e-4)
    pair.delete(instance)


def test_as_many_peers_as_asked_for_mix_engines_by_themselves(pair: Pair) -> None:
    (shown,) = [one for one in previews(pair.mlx) if one["width"] == 2 and "memory" in one["policies"]]
    instance = pair.place(min_peers=2)
    assert {stage["peer"]: stage["engine"] for stage in instance["stages"]} == {
        pair.mlx.id: "mlx",
        pair.other.id: pair.engine,
    }
    assert [stage["reserve_bytes"] for stage in instance["stages"]] == [
        stage["reserve_bytes"] for stage in shown["stages"]
    ]
    assert text_of(pair.other.chat("Spell robot.", max_tokens=MAX_TOKENS)) == "r-o-b-o-t"
    pair.delete(instance)


def previews(peer: Peer, **query: str) -> list[dict[str, Any]]:
    wish = "".join(f"&{name}={value}" for name, value in query.items())
    found: list[dict[str, Any]] = peer.api.get(f"/instance/previews?model={MODEL}{wish}", PLACE_S)["previews"]
    return found


def test_previews_show_a_mixed_ring_with_its_arithmetic(pair: Pair) -> None:
    shown = previews(pair.mlx)
    assert {entry["width"] for entry in shown} == {1, 2}
    for entry in shown:
        mixed = sorted(["mlx", pair.engine]) if entry["width"] == 2 else entry["engines"][:1]
        assert sorted(entry["engines"]) == mixed
        assert entry["activation_dtype"] == ("float32" if entry["width"] == 2 else "")
        for stage in entry["stages"]:
            parts = stage["weights_bytes"] + stage["kv_bytes"] + stage["overhead_bytes"]
            assert parts == stage["reserve_bytes"] == stage["usable_bytes"] - stage["headroom_bytes"]
    *alone, together = previews(pair.mlx, mixed_rings="never")
    assert all("refused" not in entry for entry in alone) and together["refused"]["reason"] == "mixing"


def test_tags_say_what_each_peer_computes_with(pair: Pair) -> None:
    tags = {peer["id"]: peer["tags"] for peer in pair.mlx.api.get("/v1/topology")["peers"]}
    for peer in (pair.mlx, pair.other):
        assert {"mlx", pair.engine, "act:v1", "dtype:f32"} <= set(tags[peer.id])
        assert any(tag.startswith(f"{pair.engine}-") for tag in tags[peer.id])


# with models of their own, on nodes of this process


@asynccontextmanager
async def two_nodes(tmp_path: Path, *engines: str, **settings: Any) -> AsyncIterator[tuple[Node, Node]]:
    nodes: list[Node] = []
    try:
        for index, engine in enumerate(engines):
            bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",) if nodes else ()
            options = {"models_dirs": (tmp_path / "models",), "context_limit": 256, **settings}
            home, machine = tmp_path / f"n{index}", Machine(2 * GB)
            nodes.append(make_node(home, f"n{index}", machine, engine=engine, bootstrap_peers=bootstrap, **options))
            await nodes[-1].start()
        await until(lambda: all(knows_all(node, len(nodes)) for node in nodes))
        yield nodes[0], nodes[1]
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


def reference_logits(model_dir: Path, ids: list[int]) -> np.ndarray:
    """float32 `[len(ids), vocab]`: what mlx-lm makes of all tokens in one forward."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(model_dir)
    return np.array(model(mx.array([ids])).astype(mx.float32))[0]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["numpy", "torch"])
@pytest.mark.parametrize("mlx_first", [True, False], ids=["mlx first", "mlx last"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_with_flat_logits_every_token_is_one_of_the_best(
    tmp_path: Path, other: str, mlx_first: bool, family: str
) -> None:
    needs(other)
    model = FAMILIES[family]
    model_dir = write_checkpoint(tmp_path / "models" / "flat", model)
    prompt = tuple(int(i) for i in np.random.default_rng(3).integers(0, 256, 41))
    async with two_nodes(tmp_path, *(("mlx", other) if mlx_first else (other, "mlx"))) as (first, second):
        pins = (Pin("n0", 0, 2), Pin("n1", 2, model.layers))
        instance = await first.instances.create(InstanceSpec("flat", pins=pins))
        assert {stage.engine for stage in instance.stages} == {"mlx", other}
        drawn = await tokens(second, a_request(max_tokens=48, prompt=prompt), "flat")
    logits = reference_logits(model_dir, [*prompt, *drawn[:-1]])[len(prompt) - 1 :]
    margins = logits.max(axis=-1) - logits[np.arange(len(drawn)), drawn]
    assert len(set(drawn)) > 12, "a text that repeats itself proves little"
    assert margins.max() <= MARGINS[model.dtype] * logits.std()


def write_windowed(model_dir: Path) -> None:
    """Mistral with a sliding window: mlx-lm runs it as Llama, without one."""
    write_checkpoint(model_dir, TinyModel(layers=4))
    config = {**config_json(TinyModel(layers=4)), "model_type": "mistral", "sliding_window": 64}
    write_json(model_dir / "config.json", {**config, "architectures": ["MistralForCausalLM"]})


@pytest.mark.slow
async def test_engines_that_disagree_do_not_share_a_ring(tmp_path: Path) -> None:
    needs("torch")
    write_windowed(tmp_path / "models" / "windowed")
    async with two_nodes(tmp_path, "mlx", "torch") as (first, _):
        with pytest.raises(PlacementError, match=r"mlx-\S+ .* and torch-\S+ .* differ by \d.*in layer 0") as refused:
            await first.instances.create(InstanceSpec("windowed", min_peers=2))
        assert refused.value.reason == "mixing"
        shown = await first.instances.previews(InstanceSpec("windowed"))
        assert "refused" not in shown[0] and shown[1]["refused"]["reason"] == "mixing"
        assert len((await first.instances.create(InstanceSpec("windowed"))).stages) == 1
        (kept,) = (first.settings.home / "selftests").glob("*.json")
        assert json.loads(kept.read_text())["verdict"]["difference"] > 0.1
