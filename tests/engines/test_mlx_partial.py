"""A peer that has only its own files of a checkpoint runs its stage; what it lacks is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

pytest.importorskip("mlx_lm")

from exo_mesh_mlx.engine import MlxStage

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import layer_of
from tools.architectures.mlx_configs import tiny_config
from tools.architectures.mlx_models import reference, write_checkpoint
from tools.architectures.sizes import LAYERS
from tools.architectures.trials import differences

CUT = 3


def file_per_layer(model_dir: Path, *, straddling: bool = False) -> Path:
    """Cut model.safetensors into a file per layer, one for what comes before them and one for what comes after.

    straddling: the file of each layer holds one tensor of the next layer too.
    """
    tensors: Mapping[str, mx.array] = mx.load(str(model_dir / "model.safetensors"))
    files: dict[str, dict[str, mx.array]] = {}
    for name, array in sorted(tensors.items()):
        layer = layer_of(name)
        place = ("head" if "lm_head" in name or ".norm." in name else "embed") if layer is None else str(layer)
        if straddling and layer and files.get(str(layer)) is None:
            place = str(layer - 1)
            files[str(layer)] = {}
        files.setdefault(place, {})[name] = array
    for place, held in files.items():
        mx.save_safetensors(str(model_dir / f"model-{place}.safetensors"), held)
    weight_map = {name: f"model-{place}.safetensors" for place, held in files.items() for name in held}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model_dir / "model.safetensors").unlink()
    return model_dir


def keep_only(model_dir: Path, *places: object) -> Path:
    for file in model_dir.glob("model-*.safetensors"):
        if file.stem.removeprefix("model-") not in map(str, places):
            file.unlink()
    return model_dir


def load(model_dir: Path, start: int, stop: int) -> MlxStage:
    stage = MlxStage()
    stage.load(LoadRequest(Shard("m", start, stop, LAYERS), model_dir, 512), lambda done, total: None)
    return stage


def write(directory: Path, architecture: str, **settings: object) -> Path:
    directory.mkdir()
    return write_checkpoint(directory, tiny_config(architecture) | settings)


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("deepseek_v3", "gemma3_text")),
    ],
)
def test_two_peers_with_half_of_the_files_each_give_the_bits_of_the_whole(tmp_path: Path, architecture: str) -> None:
    tied = architecture == "gemma3_text"
    halves = [write(tmp_path / name, architecture, tie_word_embeddings=tied) for name in ("first", "last")]
    want = reference(halves[0])
    first = keep_only(file_per_layer(halves[0]), "embed", *range(CUT))
    # a model whose head is the embedding table needs that on the last peer too
    last = keep_only(file_per_layer(halves[1]), "head", "embed" if tied else "", *range(CUT, LAYERS))
    stages = [load(first, 0, CUT), load(last, CUT, LAYERS)]
    assert not any(differences(stages, want).values())


def test_a_file_that_holds_part_of_a_neighbour_is_no_trouble(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", "qwen3_moe")
    file_per_layer(directory, straddling=True)
    whole = load(directory, 0, CUT)
    keep_only(directory, "embed", *range(CUT))
    first = load(directory, 0, CUT)
    for stage in (whole, first):
        stage.insert(1, 64)
    np.testing.assert_array_equal(weights_of(whole), weights_of(first))


def weights_of(stage: MlxStage) -> np.ndarray:
    """All parameters of the stage's own layers, one after the other."""
    layers = [array for layer in stage._model.layers[:CUT] for _, array in tree_flatten(layer.parameters())]
    return np.concatenate([np.array(array).reshape(-1) for array in layers])


@pytest.mark.parametrize(
    ("start", "stop", "kept", "says"),
    [
        (0, 3, ("embed", 0, 1), r"model-2\.safetensors is missing; .* holds model\.layers\.2\."),
        (0, 3, (0, 1, 2), r"layers 0 to 2 need model\.embed_tokens\.weight, .*model-embed\.safetensors"),
        (3, 6, (3, 4, 5, "embed"), r"layers 3 to 5 need (lm_head|model\.norm)\.weight, .*model-head\.safetensors"),
    ],
    ids=["layer", "embedding", "head"],
)
def test_a_file_that_the_stage_needs_is_named(
    tmp_path: Path, start: int, stop: int, kept: tuple[object, ...], says: str
) -> None:
    directory = keep_only(file_per_layer(write(tmp_path / "m", "llama", tie_word_embeddings=False)), *kept)
    with pytest.raises(ModelError, match=says):
        load(directory, start, stop)


def test_an_index_of_files_of_which_none_is_here_is_named(tmp_path: Path) -> None:
    directory = keep_only(file_per_layer(write(tmp_path / "m", "llama")))
    with pytest.raises(ModelError, match=r"^m: model-.*\.safetensors is missing"):
        load(directory, 0, 3)
