"""A stage of any engine reads its own share of a checkpoint, and says what is wrong with a bad one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import EngineProvider, LoadRequest, StageEngine
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import read_card
from tests.support.checkpoints import TinyModel, tensor_shapes, write_checkpoint, write_json, write_safetensors
from tests.support.heavy import checkpoint_bytes, eight_layers

ENGINES = ("numpy", "mlx", "torch")
OPTIONS = {"torch": {"threads": "1"}}
SMALL = TinyModel(layers=4)
SLACK = 1.15
"""A stage may take 15 % more than the bytes of its tensors."""

UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"


def provider_of(engine: str) -> EngineProvider:
    provider: EngineProvider = import_module(f"exo_mesh_{engine}").provider
    look = provider.availability()
    if not look.available:
        pytest.skip(look.reason)
    return provider


def load(engine: str, model_dir: Path, start: int, stop: int, progress: Any = lambda done, total: None) -> StageEngine:
    stage = provider_of(engine).create()
    stage.load(LoadRequest(Shard("tiny", start, stop, 4), model_dir, 512, OPTIONS.get(engine, {})), progress)
    return stage


@pytest.mark.parametrize("engine", ENGINES)
def test_progress_counts_the_bytes_of_the_layers(tmp_path: Path, engine: str) -> None:
    card = read_card(write_checkpoint(tmp_path, SMALL), "tiny")
    seen: list[tuple[int, int]] = []
    load(engine, tmp_path, 1, 4, lambda done, total: seen.append((done, total))).close()
    ends = card.head_bytes if engine == "numpy" else 0  # the others count layers alone
    total = sum(card.layer_bytes[1:4]) + ends
    assert seen == [*((sum(card.layer_bytes[1 : 1 + i]), total) for i in range(4)), *([(total, total)] if ends else [])]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda shapes: shapes.pop(UP), re.escape(UP)),
        (lambda shapes: shapes.update({NORM: (3,)}), rf"{re.escape(NORM)}.* \[3\]|shape \(?3.*{re.escape(NORM)}"),
        (lambda shapes: shapes.update({"model.norm.weight": (3,)}), r"model\.norm\.weight"),
        (lambda shapes: shapes.update({"model.layers.1.surplus.weight": (3,)}), r"model\.layers\.1\.surplus\.weight"),
        (lambda shapes: shapes.pop("model.embed_tokens.weight"), r"model\.embed_tokens\.weight"),
    ],
    ids=["missing", "wrong-shape", "wrong-norm", "surplus", "no-embedding"],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(
    tmp_path: Path, engine: str, change: Callable[[dict[str, tuple[int, ...]]], Any], says: str
) -> None:
    shapes = tensor_shapes(SMALL)
    write_checkpoint(tmp_path, SMALL)
    change(shapes)
    write_safetensors(tmp_path / "model.safetensors", shapes, "float32", lambda name: np.ones(shapes[name], np.float32))
    with pytest.raises(ModelError, match=says) as caught:
        load(engine, tmp_path, 0, 4)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_truncated_file_is_named_with_a_tensor_that_this_stage_does_not_need(tmp_path: Path, engine: str) -> None:
    file = write_checkpoint(tmp_path, SMALL) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(ModelError, match=r"model\.safetensors: lm_head\.weight ends at"):
        load(engine, tmp_path, 0, 2)


@pytest.mark.parametrize("engine", ["mlx", "torch"])
@pytest.mark.parametrize("model_type", ["no_such_thing", "../../evil", "os", "cache", "vit"])
def test_an_unknown_architecture_is_refused(tmp_path: Path, engine: str, model_type: str) -> None:
    config = json.loads((write_checkpoint(tmp_path, SMALL) / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, "model_type": model_type})
    assert not provider_of(engine).supports(model_type)
    says = rf"config\.json: model_type {re.escape(json.dumps(model_type))} is not supported"
    with pytest.raises(ModelError, match=says):
        load(engine, tmp_path, 0, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_asking_the_provider_imports_nothing_heavy(engine: str) -> None:
    heavy = {"mlx", "mlx_lm", "torch", "transformers", "scipy", *(["numpy"] if engine == "numpy" else [])}
    code = (
        f"import sys; from exo_mesh_{engine} import provider as p; p.availability(); p.supports('llama'); p.version(); "
        f"sys.exit(any(name.split('.')[0] in {heavy} for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


MEASURE = """
import json, re, resource, sys
from importlib import import_module
from pathlib import Path
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest
engine, start, stop, layers = sys.argv[1], *map(int, sys.argv[3:6])
stage = import_module(f"exo_mesh_{engine}").provider.create()
request = LoadRequest(Shard("big", start, stop, layers), Path(sys.argv[2]), 512, json.loads(sys.argv[6]))
stage.load(request, lambda done, total: None)
if sys.platform == "darwin":
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
else:  # ru_maxrss would count what the parent had before exec
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
"""


def peak_rss_bytes(engine: str, model_dir: Path, start: int, stop: int, num_layers: int, **options: str) -> int:
    """Most memory of a fresh process that loads a stage."""
    own = json.dumps({**OPTIONS.get(engine, {}), **options})
    command = [sys.executable, "-c", MEASURE, engine, str(model_dir), *map(str, (start, stop, num_layers)), own]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("engine", "dtype"), [("mlx", ""), ("torch", "bfloat16"), ("torch", "float32")])
def test_peak_memory_of_a_stage_of_a_large_checkpoint(tmp_path: Path, engine: str, dtype: str) -> None:
    """Against what the engine takes for a tiny model: imports, compiled kernels, the warm-up."""
    options = {"dtype": dtype} if dtype else {}
    model = eight_layers(checkpoint_bytes(2.0))  # the largest stage is half of it
    card = read_card(write_checkpoint(tmp_path / "big", model, repeat=True), "big")
    bare = peak_rss_bytes(engine, write_checkpoint(tmp_path / "small", SMALL), 0, 2, 4, **options)
    scale = 2 if dtype == "float32" else 1
    print(f"checkpoint {card.total_bytes / 1e6:.0f} MB, a tiny model {bare / 1e6:.0f} MB")
    for start, stop in ((0, 4), (4, 8), (0, 2), (2, 6), (6, 8)):
        share = scale * card.shard_bytes(start, stop)
        peak = peak_rss_bytes(engine, tmp_path / "big", start, stop, 8, **options)
        print(f"layers {start}:{stop}: share {share / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
        assert peak <= share * SLACK + bare


BIG = TinyModel(layers=8, hidden=768, heads=12, kv_heads=4, intermediate=2048, vocab=8000, dtype="bfloat16", shards=3)


@pytest.mark.extended
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_of_a_numpy_stage_is_the_share_in_float32_and_little_more(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "big", BIG, repeat=True)
    survey = provider_of("numpy").survey(tmp_path / "big", {})  # type: ignore[attr-defined]
    bare = peak_rss_bytes("numpy", write_checkpoint(tmp_path / "small", SMALL), 0, 1, 4)
    for start, stop in ((0, 2), (2, 6), (6, 8)):
        share = sum(survey.layer_bytes[start:stop])
        share += (start == 0) * survey.embed_bytes + (stop == 8) * survey.head_bytes
        peak = peak_rss_bytes("numpy", tmp_path / "big", start, stop, 8) - bare
        print(f"layers {start}:{stop}: share {share / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB: {peak / share:.3f}")
        assert share * 0.95 < peak <= share * SLACK
