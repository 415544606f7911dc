"""The MLX engine's shared parts of KV; test_shared_kv.py has what every engine must show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

from exo_mesh_mlx import provider, ragged
from exo_mesh_mlx.engine import MlxStage
from exo_mesh_mlx.shared import alone

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import LEAST_SHARED, StageInput
from exo_mesh.errors import EngineError
from exo_mesh.weights.random_checkpoint import TinyModel
from exo_mesh.weights.random_checkpoint import write_checkpoint as write_model
from tests.support.exactness import EPSILON, rms
from tests.support.shared_streams import PROMPT
from tools.architectures.mlx_configs import tiny_config
from tools.architectures.mlx_models import write_checkpoint
from tools.architectures.sizes import LAYERS
from tools.stages import Stages


def open_stage(directory: Path, architecture: str) -> MlxStage:
    (stage,) = Stages(provider, write_checkpoint(directory, tiny_config(architecture)), LAYERS).ring(())
    assert isinstance(stage, MlxStage)
    return stage


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxStage]:
    made = open_stage(tmp_path_factory.mktemp("model"), "qwen3")
    yield made
    made.close()


@pytest.fixture
def stage(loaded: MlxStage) -> Iterator[MlxStage]:
    yield loaded
    for sequence in loaded.sequences():
        loaded.remove(sequence)


def compute(stage: MlxStage, *rows: tuple[int, int, tuple[int, ...]]) -> np.ndarray:
    """The logits of the last position of each row (sequence, pos0, tokens)."""
    ids = tuple(token for _, _, tokens in rows for token in tokens)
    output = stage.forward(StageInput(tuple(Row(one, pos0, len(of), 1) for one, pos0, of in rows), ids, {}))
    assert not output.faults and output.logits is not None
    return output.logits


def check(stage: MlxStage, got: np.ndarray, context: tuple[int, ...]) -> None:
    """Compare logits with those of a sequence that computes all tokens alone."""
    stage.insert(9999, 3000)
    wanted = compute(stage, (9999, 0, context))[0]
    stage.remove(9999)
    assert float(np.abs(got - wanted).max()) / rms(wanted) <= EPSILON["float32"]


def begin(stage: MlxStage, length: int = len(PROMPT)) -> None:
    stage.insert(1, 3000)
    compute(stage, (1, 0, PROMPT[:length]))


def test_a_saved_mlx_sequence_has_its_shared_positions_in_parts_too(stage: MlxStage) -> None:
    begin(stage, 600)
    stage.copy(1, 2, 600, 3000)
    compute(stage, (2, 600, (5,)))
    whole = stage.save(2)
    in_parts = {name: tensor for part in stage.save_parts(2) for name, tensor in part.tensors.items()}
    assert in_parts == whole.tensors and whole.length == 601


def test_a_lone_mlx_sequence_gets_arrays_of_its_own_until_another_computes(stage: MlxStage) -> None:
    begin(stage, 600)
    stage.copy(1, 2, 600, 3000)
    context, before = PROMPT[:600], stage.memory_bytes()
    for token in range(3, 3 + alone.PATIENCE + 2):
        context += (token,)
        got = compute(stage, (2, len(context) - 1, (token,)))
    assert stage.memory_bytes() - before > 2 * 600 * stage_kv_bytes(stage), "its positions, beside the shared ones"
    check(stage, got[0], context)
    stage.copy(2, 3, 603, 3000)
    check(stage, compute(stage, (3, 603, (8,)))[0], (*context[:603], 8))
    both = compute(stage, (1, 600, (5,)), (2, len(context), (6,)))
    check(stage, both[1], (*context, 6))
    assert stage.memory_bytes() - before < 4 * 300 * stage_kv_bytes(stage), "the shared positions are held once again"
    for _ in range(alone.PATIENCE + 1):
        got = compute(stage, (2, 400, (5,)))
    check(stage, got[0], (*context[:400], 5))


def test_a_lone_mlx_sequence_gives_up_parts_that_no_other_one_holds(stage: MlxStage) -> None:
    before = stage.memory_bytes()
    begin(stage)
    one_copy, context = stage.memory_bytes() - before, PROMPT
    stage.copy(1, 2, 1000, 3000)
    stage.copy(1, 3, 400, 3000)

    def go_on(steps: int) -> np.ndarray:
        nonlocal context
        for _ in range(steps):
            context += (7,)
            got = compute(stage, (2, len(context) - 1, (7,)))
        return got

    go_on(alone.PATIENCE + 1)
    assert stage.memory_bytes() - before > 1.9 * one_copy, "its own positions, and those that others hold"
    stage.remove(1)
    assert stage.memory_bytes() - before > 1.9 * one_copy, "another one holds 400 of these"
    stage.remove(3)
    assert stage.memory_bytes() - before < 1.4 * one_copy
    stage.insert(4, 3000)
    compute(stage, (4, 0, PROMPT[:9]))
    check(stage, go_on(1), context)


def test_mlx_rows_compute_in_one_array_after_model_code_failed_with_parts(
    stage: MlxStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(stage, 600)
    for sequence in (2, 3):
        stage.copy(1, sequence, 600, 3000)

    def fail(*_: object) -> None:
        raise TypeError("not with parts")

    monkeypatch.setattr(stage, "batched", True)  # undone when the test ends
    monkeypatch.setattr(ragged, "attend", fail)
    with pytest.raises(EngineError, match="not with parts"):
        compute(stage, (2, 600, (5,)))
    stage.remove(2)
    check(stage, compute(stage, (3, 600, (5,)))[0], (*PROMPT[:600], 5))
    stage.copy(3, 4, 601, 3000)
    both = compute(stage, (4, 601, (6,)), (1, 600, (5,)))
    check(stage, both[0], (*PROMPT[:600], 5, 6))
    check(stage, both[1], (*PROMPT[:600], 5))


def stage_kv_bytes(stage: MlxStage) -> int:
    """Half of the bytes of a position: keys alone."""
    entries = stage._sequences[1].cache.own_entries()
    return sum(entry.parts[0].keys.nbytes // entry.parts[0].length for entry in entries)


def test_positions_that_only_ended_sequences_held_are_freed(stage: MlxStage) -> None:
    before = stage.memory_bytes()
    begin(stage)
    per_position = (stage.memory_bytes() - before) // 1024
    stage.copy(1, 2, 1000, 3000)
    for sequence, upto in ((3, 700), (4, 400), (5, 500)):
        stage.copy(2, sequence, upto, 3000)
    stage.remove(1)
    stage.remove(2)
    assert stage.memory_bytes() - before < 900 * per_position, "700, and what MLX's buffers are too large"
    got = compute(stage, (4, 400, (5,)), (3, 700, (5,)))
    check(stage, got[0], (*PROMPT[:400], 5))
    stage.remove(3)
    check(stage, compute(stage, (5, 500, (5,)))[0], (*PROMPT[:500], 5))
    stage.remove(5)
    check(stage, compute(stage, (4, 401, (6,)))[0], (*PROMPT[:400], 5, 6))
    for sequence in stage.sequences():
        stage.remove(sequence)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shared_mlx_rows_in_half_precision_choose_what_they_choose_alone(tmp_path: Path, dtype: str) -> None:
    model = TinyModel("llama", layers=4, hidden=64, heads=4, kv_heads=2, intermediate=128, dtype=dtype)
    (half,) = Stages(provider, write_model(tmp_path, model), 4).ring(())
    assert isinstance(half, MlxStage) and half.capabilities.shares_from == LEAST_SHARED
    begin(half, 600)
    held = {1: PROMPT[:600]}
    for sequence in (2, 3, 4):
        half.copy(1, sequence, 600, 3000)
        held[sequence] = PROMPT[:600]
    chosen = dict.fromkeys(held, 5)
    for step in range(12):
        rows = [(sequence, len(held[sequence]), (chosen[sequence] + sequence * (not step),)) for sequence in held]
        for sequence, _, tokens in rows:
            held[sequence] += tokens
        got = compute(half, *rows)
        chosen = {sequence: int(got[place].argmax()) for place, sequence in enumerate(held)}
    for sequence, context in held.items():
        half.insert(9999, 3000)
        wanted = compute(half, (9999, 0, context))[0]
        half.remove(9999)
        assert float(wanted.max() - wanted[chosen[sequence]]) / rms(wanted) <= EPSILON["bfloat16"]
    half.close()


@pytest.mark.parametrize(
    ("architecture", "shares"),
    [
        ("gemma3_text", False),
        pytest.param("deepseek_v3", False, marks=pytest.mark.extended),
        pytest.param("qwen3_next", True, marks=pytest.mark.extended),
    ],
)
def test_the_kinds_of_mlx_cache_that_share(tmp_path: Path, architecture: str, shares: bool) -> None:
    other = open_stage(tmp_path, architecture)
    assert bool(other.capabilities.shares_from) == shares
    other.insert(1, 3000)
    compute(other, (1, 0, PROMPT[:600]))
    other.copy(1, 2, 600, 3000)
    got = compute(other, (1, 600, (5,)), (2, 600, (6,)))
    other.close()
    assert got.shape[0] == 2
