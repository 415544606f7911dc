"""Which engines a node says run a model on its disk, before anybody asks one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exo_mesh_mlx.provider import MlxProvider
from exo_mesh_numpy.provider import NumpyProvider
from exo_mesh_torch.provider import TorchProvider

from exo_mesh.cli.verbs.models.facts import fit_text
from exo_mesh.engine.contract import EngineProvider, NamesQuantisations
from exo_mesh.errors import ModelError
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.weights.card import QUANT_METHODS, quant_method_at
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.nodes import Machine, make_node

pytest.importorskip("mlx")


def quantised(directory: Path, method: str) -> Path:
    """A checkpoint whose config.json names a quantisation, with plain weights."""
    write_checkpoint(directory, TinyModel(layers=1))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    return directory


async def test_a_model_that_no_engine_reads_is_listed_as_that(tmp_path: Path) -> None:
    models = tmp_path / "models"
    quantised(models / "ours", "gguf")
    write_checkpoint(models / "plain", TinyModel(layers=1))
    node = make_node(tmp_path / "n", "n", Machine(), engine="mlx", models_dirs=(models,))
    await node.start()
    try:
        (peer,) = node.membership.view.peers()
        engines = dict(peer.model_engines)
        assert (engines["ours"], engines["plain"]) == ((), ("mlx",))
        shown = {"id": peer.id, "model_engines": {name: list(able) for name, able in engines.items()}}
        state = {"view": {"peers": [shown]}, "telemetry": {peer.id: {"usable_bytes": 10**9}}}
        assert fit_text(1000, state, name="ours") == "no: no engine of the peers runs it"
        assert fit_text(1000, state, name="plain") == "yes, 1 peer"
    finally:
        await node.stop()


@pytest.mark.extended
async def test_a_model_that_no_engine_reads_is_refused_with_the_reason_of_the_engine(tmp_path: Path) -> None:
    quantised(tmp_path / "models" / "ours", "gguf")
    node = make_node(tmp_path / "n", "n", Machine(), engine="mlx", models_dirs=(tmp_path / "models",))
    await node.start()
    try:
        with pytest.raises(ModelError, match="the mlx engine does not read GGUF"):
            await node.instances.create(InstanceSpec("ours"))
    finally:
        await node.stop()


@pytest.mark.parametrize("method", sorted({*QUANT_METHODS} - {"gguf"}))
@pytest.mark.parametrize(
    "provider", [MlxProvider(), NumpyProvider(), pytest.param(TorchProvider(), marks=pytest.mark.extended)]
)
def test_an_engine_refuses_the_quantisations_that_it_does_not_name(
    provider: EngineProvider, method: str, tmp_path: Path
) -> None:
    assert isinstance(provider, NamesQuantisations)
    if provider.name == "torch":
        pytest.importorskip("torch")
    directory = quantised(tmp_path / "tiny", method)
    assert quant_method_at(directory) == method and quant_method_at(tmp_path) == ""
    if method not in provider.quant_methods:
        with pytest.raises(ModelError, match="quant_method"):
            provider.survey(directory, {})  # type: ignore[attr-defined]
