"""What the MLX engine says of a model before and after loading it: cuts, exact bytes, kinds, dtypes, what crosses."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm")

from exo_mesh_mlx import provider
from exo_mesh_mlx.engine import MlxStage

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import (
    COUNTED_STATES,
    CUT_POSITIONS,
    LoadRequest,
    ModelSurvey,
    SequenceSaver,
    StageInput,
    Surveyor,
    TensorSpec,
)
from exo_mesh.errors import EngineError
from exo_mesh.weights.card import read_card
from tests.support.checkpoints import TinyModel
from tests.support.checkpoints import write_checkpoint as write_tiny
from tools.architectures.mlx_configs import tiny_config
from tools.architectures.mlx_models import write_checkpoint
from tools.architectures.sizes import HEAD_DIM, KV_HEADS, LAYERS, WINDOW

FLOAT_BYTES = 4
HELD = WINDOW + CUT_POSITIONS
POSITION_BYTES = 2 * KV_HEADS * HEAD_DIM * FLOAT_BYTES
"""Keys and values of one layer for one position."""


def survey(directory: Path, architecture: str) -> ModelSurvey:
    assert isinstance(provider, Surveyor)
    return provider.survey(write_checkpoint(directory, tiny_config(architecture)), {})


def load(model_dir: Path, start: int, stop: int, num_layers: int, dtype: str = "") -> MlxStage:
    stage = MlxStage()
    shard = Shard("m", start, stop, num_layers)
    stage.load(LoadRequest(shard, model_dir, 512, activation_dtype=dtype), lambda done, total: None)
    return stage


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_those_of_the_files_where_nothing_is_rearranged(tmp_path: Path, tied: bool) -> None:
    model_dir = write_tiny(tmp_path, TinyModel("qwen2", layers=4, tied=tied, dtype="bfloat16"))
    card, found = read_card(model_dir, "tiny"), provider.survey(model_dir, {})
    assert found.layer_bytes == card.layer_bytes
    assert (found.embed_bytes, found.head_bytes) == (card.embed_bytes, card.head_bytes)
    assert (found.legal_cuts, found.reason) == ((1, 2, 3), "")
    assert found.kv_bytes_per_token == (card.kv_bytes_per_token,) * 4 and found.kv_fixed_bytes == (0,) * 4
    assert len(set(found.layer_kinds)) == 1


def test_windows_and_full_attention_take_what_they_take(tmp_path: Path) -> None:
    found = survey(tmp_path, "gemma3_text")
    full = [index % 3 == 2 for index in range(LAYERS)]
    assert found.kv_bytes_per_token == tuple(POSITION_BYTES if is_full else 0 for is_full in full)
    assert found.kv_fixed_bytes == tuple(0 if is_full else HELD * POSITION_BYTES for is_full in full)
    assert [kind.split()[1] for kind in found.layer_kinds] == ["full" if is_full else "window" for is_full in full]
    assert len(set(found.layer_kinds)) == 2


def test_latents_take_their_width_once(tmp_path: Path) -> None:
    found = survey(tmp_path, "deepseek_v3")
    assert found.kv_bytes_per_token == ((16 + 8) * FLOAT_BYTES,) * LAYERS
    assert len(set(found.layer_kinds)) == 2, "the first layer is dense, the others have experts"


def test_chunks_are_a_constant(tmp_path: Path) -> None:
    found = survey(tmp_path, "llama4")
    assert HELD * POSITION_BYTES in found.kv_fixed_bytes and POSITION_BYTES in found.kv_bytes_per_token


@pytest.mark.parametrize("architecture", ["mamba2", "rwkv7", "lfm2"])
def test_states_are_what_a_sequence_holds_however_long_it_is(tmp_path: Path, architecture: str) -> None:
    found = survey(tmp_path, architecture)
    stage = load(tmp_path, 0, LAYERS, LAYERS)
    stage.insert(1, 64)
    stage.forward(StageInput((Row(1, 0, 40, 1),), tuple(range(40)), {}))
    saved = stage.save(1)
    held = sum(tensor.num_bytes for tensor in saved.tensors.values() if tensor.dtype == "float32")
    assert "recurrent" in stage.capabilities.kv
    assert held == sum(found.kv_fixed_bytes) // (1 + COUNTED_STATES) + 40 * sum(found.kv_bytes_per_token)


def test_what_cannot_be_cut_says_why_and_still_has_bytes(tmp_path: Path) -> None:
    found = survey(tmp_path, "nanbeige")
    assert found.legal_cuts == () and "looped" in found.reason
    total = sum(array.nbytes for array in mx.load(str(tmp_path / "model.safetensors")).values())
    assert sum(found.layer_bytes) + found.embed_bytes + found.head_bytes == total


def test_a_stage_declares_what_crosses_its_ends(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("rwkv7"))
    hidden = TensorSpec("hidden", "float32", (32,))
    first, middle, last = (load(tmp_path, *cut, LAYERS) for cut in ((0, 2), (2, 4), (4, 6)))
    assert first.capabilities.inputs == () and last.capabilities.outputs == ()
    assert first.capabilities.outputs == middle.capabilities.inputs
    assert middle.capabilities.inputs[0] == hidden and len(middle.capabilities.inputs) == 2
    first.insert(1, 8)
    tensors = first.forward(StageInput((Row(1, 0, 3),), (1, 2, 3), {})).tensors
    for spec in first.capabilities.outputs:
        assert (tensors[spec.name].dtype, tensors[spec.name].shape) == (spec.dtype, (3, *spec.item_shape))


def test_activations_travel_in_the_dtype_that_was_agreed(tmp_path: Path) -> None:
    model_dir = write_tiny(tmp_path, TinyModel("llama", layers=4))
    exact, halved = load(model_dir, 0, 2, 4), load(model_dir, 0, 2, 4, "bfloat16")
    last = load(model_dir, 2, 4, 4, "bfloat16")
    assert halved.capabilities.outputs == (TensorSpec("hidden", "bfloat16", (64,)),)
    logits = []
    for first in (exact, halved):
        for stage in (first, last):
            stage.remove(1)
            stage.insert(1, 16)
        sent = first.forward(StageInput((Row(1, 0, 5),), (1, 2, 3, 4, 5), {})).tensors
        logits.append(last.forward(StageInput((Row(1, 0, 5, 1),), (1, 2, 3, 4, 5), sent)).logits)
    assert sent["hidden"].num_bytes == 5 * 64 * 2
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.05
    with pytest.raises(EngineError, match='activation_dtype "int8"'):
        load(model_dir, 0, 2, 4, "int8")


def test_a_saved_sequence_goes_on_in_another_process_of_the_same_stage_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3_next"))
    one, same, other = load(tmp_path, 0, 3, LAYERS), load(tmp_path, 0, 3, LAYERS), load(tmp_path, 3, 6, LAYERS)
    one.insert(1, 64)
    one.forward(StageInput((Row(1, 0, 5),), (1, 2, 3, 4, 5), {}))
    assert isinstance(one, SequenceSaver)
    saved = one.save(1)
    same.restore(7, 64, saved)
    step = [stage.forward(StageInput((Row(seq, 5, 1),), (9,), {})) for stage, seq in ((one, 1), (same, 7))]
    assert bytes(step[0].tensors["hidden"].data) == bytes(step[1].tensors["hidden"].data)
    assert saved.length == 5
    with pytest.raises(EngineError, match="lacks tensor"):
        other.restore(1, 64, saved)
    with pytest.raises(EngineError, match="do not fit in room for 4"):
        same.restore(8, 4, saved)
    with pytest.raises(EngineError, match="sequence 3 is not known"):
        one.save(3)
    assert list(other.sequences()) == [] and list(same.sequences()) == [7]


def test_the_provider_says_what_it_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("exo_mesh_mlx.provider")
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module, "_version", lambda name: "1" if name == "mlx-cpu" else "")
    assert module.MlxProvider().availability().compute == "cpu"
    monkeypatch.setattr(module, "_version", lambda name: "1" if name == "mlx-cuda-12" else "")
    monkeypatch.setattr(module, "_NVIDIA_DEVICES", ("/nowhere/nvidia0",))
    without = module.MlxProvider().availability()
    assert not without.available and "no NVIDIA GPU" in without.reason and "mlx[cpu]" in without.remedy
    monkeypatch.setattr(module, "_NVIDIA_DEVICES", ("/dev/null",))
    assert module.MlxProvider().availability().compute == "cuda"
