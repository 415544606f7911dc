"""Quantised formats that no engine of a mesh takes are refused before weights are fetched, by format and engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exo_mesh.errors import ModelError
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.meshes.test_fetching import nodes_at
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json
from tests.support.hub import LoopbackHub

pytestmark = pytest.mark.slow

MODEL = TinyModel(layers=4, hidden=128, heads=4, kv_heads=2, intermediate=384, vocab=2000)
FORMATS = {
    "bitnet": {"linear_class": "bitlinear"},
    "modelopt": {"quant_algo": "NVFP4"},
    "mxfp4": {},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


@pytest.mark.parametrize("engine", ["numpy", "torch"])  # mlx takes some of these
async def test_formats_that_no_engine_takes_are_refused_before_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    with LoopbackHub() as hub:
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        for method, settings in FORMATS.items():
            directory = write_checkpoint(tmp_path / "hub" / method, MODEL)
            config = json.loads((directory / "config.json").read_text())
            config["quantization_config"] = {"quant_method": method, **settings}
            write_json(directory / "config.json", config)
            hub.add(f"org/{method}", directory)
        header_and_samples = 0.02 * (directory / "model.safetensors").stat().st_size
        async with nodes_at(tmp_path, "a", engine=engine) as (node,):
            for method in FORMATS:
                hub.sent.clear()
                with pytest.raises(ModelError) as caught:
                    await node.models.find(f"org/{method}", may_download=True)
                    await node.instances.create(InstanceSpec(f"org/{method}"))
                assert f"{method}' is not supported" in str(caught.value).replace('"', "'")
                assert f": {engine}: " in str(caught.value) or "by any engine" in str(caught.value)
                assert hub.sent_of(".safetensors") < header_and_samples
