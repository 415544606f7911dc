"""A stage runs from a directory with its own pieces only: in place of every other byte of the weights stands a NaN."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import EngineProvider, LoadProgress, LoadRequest, StageEngine
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.excerpt import write_excerpt
from exo_mesh.weights.fetched import part_of
from exo_mesh.weights.store import ModelStore
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.partial import copy_partly, layer_pieces
from tools.stages import CONTEXT, forward, insert, remove

LAYERS = 4
CUT = 2
PROMPT = np.arange(7) * 29 % 300


def provider_of(engine: str) -> EngineProvider:
    for library in {"mlx": ("mlx_lm",), "torch": ("torch", "transformers"), "numpy": ()}[engine]:
        pytest.importorskip(library)
    provider: EngineProvider = importlib.import_module(f"exo_mesh_{engine}").provider
    return provider


def stage_of(
    provider: EngineProvider,
    directory: Path,
    start: int,
    stop: int,
    num_layers: int = LAYERS,
    progress: LoadProgress = lambda done, total: None,
) -> StageEngine:
    stage = provider.create()
    stage.load(LoadRequest(Shard("m", start, stop, num_layers), directory, CONTEXT), progress)
    return stage


def outputs(provider: EngineProvider, directories: list[Path]) -> np.ndarray:
    """Logits of a prompt and of a step, by a ring with a stage per directory."""
    bounds = (0, CUT, LAYERS)
    stages = [
        stage_of(provider, directory, start, stop)
        for directory, start, stop in zip(directories, bounds, bounds[1:], strict=False)
    ]
    insert(stages, [1], 32)
    first = forward(stages, [Row(1, 0, 7, 7)], PROMPT)
    second = forward(stages, [Row(1, 7, 1, 1)], PROMPT[:1])
    remove(stages, [1])
    for stage in stages:
        stage.close()
    return np.concatenate([first, second])


def halves(model_dir: Path, target: Path) -> list[Path]:
    return [
        copy_partly(model_dir, target / "first", layer_pieces(model_dir, 0, CUT, LAYERS)),
        copy_partly(model_dir, target / "last", layer_pieces(model_dir, CUT, LAYERS, LAYERS)),
    ]


@pytest.mark.parametrize("engine", ["numpy", "mlx", "torch"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TinyModel(layers=LAYERS), id="one-file"),
        pytest.param(TinyModel("qwen3", layers=LAYERS, tied=True, shards=3, seed=1), id="three-files-tied"),
    ],
)
def test_two_peers_with_their_pieces_only_give_the_bits_of_the_whole(
    tmp_path: Path, engine: str, model: TinyModel
) -> None:
    provider = provider_of(engine)
    whole = write_checkpoint(tmp_path / "whole", model)
    partial = halves(whole, tmp_path)
    assert list(partial[0].glob("*.part")), "not all of the weights were fetched"
    expected = outputs(provider, [whole, whole])
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(outputs(provider, partial), expected)


@pytest.mark.extended
@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "gemma3_text", "mixtral", "gpt_oss"])
def test_architectures_of_mlx_need_no_byte_beside_their_pieces(tmp_path: Path, architecture: str) -> None:
    pytest.importorskip("mlx_lm")
    from exo_mesh_mlx import provider

    from tools.architectures.mlx_configs import tiny_config
    from tools.architectures.mlx_models import reference
    from tools.architectures.mlx_models import write_checkpoint as write_architecture
    from tools.architectures.sizes import LAYERS as DEPTH
    from tools.architectures.trials import differences

    whole = tmp_path / "whole"
    whole.mkdir()
    write_architecture(whole, tiny_config(architecture))
    (whole / "tokenizer.json").write_text("{}")
    cut = provider.survey(whole, {}).legal_cuts[0]
    partial = [
        (copy_partly(whole, tmp_path / str(start), layer_pieces(whole, start, stop, DEPTH)), start, stop)
        for start, stop in ((0, cut), (cut, DEPTH))
    ]
    stages = [stage_of(provider, directory, start, stop, DEPTH) for directory, start, stop in partial]
    assert not any(differences(stages, reference(whole)).values())


@pytest.mark.parametrize("engine", ["numpy", "mlx", "torch"])
def test_a_file_may_become_whole_while_a_stage_is_loaded(tmp_path: Path, engine: str) -> None:
    provider = provider_of(engine)
    whole = write_checkpoint(tmp_path / "whole", TinyModel(layers=LAYERS, shards=3))
    directory = copy_partly(whole, tmp_path / "partial", layer_pieces(whole, 0, LAYERS, LAYERS))
    for file in directory.glob("*.safetensors"):
        file.rename(part_of(directory, file.name))

    def complete(done: int, total: int) -> None:
        for part in directory.glob("*.part"):
            part.rename(part.with_suffix(""))

    stage = stage_of(provider, directory, 0, LAYERS, progress=complete)
    stage.close()
    assert not list(directory.glob("*.part"))


def test_the_card_of_a_partly_fetched_model_is_that_of_the_whole(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel(layers=LAYERS, shards=3))
    skeleton = copy_partly(whole, tmp_path / "models" / "m", {})
    assert read_card(skeleton, "m") == read_card(whole, "m")
    assert ModelStore([tmp_path / "models"]).card("m").digest == read_card(whole, "m").digest


def test_a_self_test_does_not_take_holes_for_weights(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel(layers=LAYERS, shards=3))
    partial = copy_partly(whole, tmp_path / "partial", layer_pieces(whole, 0, CUT, LAYERS))
    with pytest.raises(ModelError, match=r"partial: .*layers\.3\..* is not on this machine yet"):
        write_excerpt(partial, tmp_path / "excerpt", [3])
    shutil.rmtree(partial)
    every = copy_partly(whole, partial, layer_pieces(whole, 0, LAYERS, LAYERS))
    assert write_excerpt(every, tmp_path / "excerpt", [0, 3]).is_dir()
