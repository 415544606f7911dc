"""A model whose files have the oddities of real ones is computed as the plain model is, by each engine that runs it."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.text.text_files import check_text_files
from exo_mesh.weights.store import ModelStore
from tests.engines.test_partly_fetched import provider_of, stage_of
from tests.support.checkpoints import TinyModel, write_checkpoint
from tools.stages import forward, insert

BOM = b"\xef\xbb\xbf"
PROMPT = np.arange(9) * 31 % 95
ODD: dict[str, Any] = {
    "sliding_window": -1,
    "eos_token_id": -1,
    "pad_token_id": -1,
    "time_step_limit": [0.0, math.inf],
    "some_limit": {"__float__": "-Infinity"},
    "another": math.nan,
}


def make_odd(directory: Path, settings: dict[str, Any], *, nested: bool = False) -> None:
    """Put the settings into config.json, and a byte-order mark before every JSON file."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **settings}))
    (directory / "generation_config.json").write_text('{"top_k": -1, "eos_token_id": [299]}')
    for one in directory.glob("*.json"):
        one.write_bytes(BOM + one.read_bytes())


def logits(engine: str, directory: Path, layers: int) -> np.ndarray:
    stage = stage_of(provider_of(engine), directory, 0, layers, layers)
    insert([stage], [1], 32)
    found = forward([stage], [Row(1, 0, len(PROMPT), len(PROMPT))], PROMPT)
    stage.close()
    return found


@pytest.mark.parametrize("engine", ["numpy", "mlx", pytest.param("torch", marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "model",
    [
        TinyModel("llama", layers=2, shards=2),
        pytest.param(TinyModel("qwen3", layers=2, tied=True), marks=pytest.mark.extended),
        pytest.param(TinyModel("qwen2", layers=2), marks=pytest.mark.extended),
    ],
    ids=lambda model: model.arch,
)
def test_a_listed_model_with_odd_files_computes_what_the_plain_one_does(
    tmp_path: Path, engine: str, model: TinyModel
) -> None:
    plain, odd = (write_checkpoint(tmp_path / name, model) for name in ("plain", "odd"))
    make_odd(odd, ODD)
    card = ModelStore([tmp_path], check=check_text_files).card("odd")
    assert (card.num_layers, card.eos_ids) == (2, (299,))
    assert provider_of(engine).supports(card.architecture)
    np.testing.assert_array_equal(logits(engine, odd, 2), logits(engine, plain, 2))


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="needs mlx-lm")
def test_a_mamba_without_a_limit_of_its_time_steps_is_computed(tmp_path: Path) -> None:
    from tools.architectures.mlx_configs import tiny_config
    from tools.architectures.mlx_models import write_checkpoint as write_family
    from tools.architectures.sizes import LAYERS

    for name, most in (("plain", 1e9), ("odd", math.inf)):
        (tmp_path / name).mkdir()
        write_family(tmp_path / name, {**tiny_config("mamba2"), "time_step_limit": [0.0, most]})
    assert "Infinity" in (tmp_path / "odd" / "config.json").read_text()
    plain, odd = (logits("mlx", tmp_path / name, LAYERS) for name in ("plain", "odd"))
    np.testing.assert_array_equal(odd, plain)
