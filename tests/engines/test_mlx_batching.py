"""Rows of several sequences go through an MLX stage together, and each gets the bits that it gets alone.

Bits are compared because MLX on CPU multiplies with a BLAS whose rows do not depend on each other, and because each row
attends by itself here; test_mlx_blocks.py has rows that attend together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from exo_mesh_mlx import batching, provider
from exo_mesh_mlx import engine as engine_module
from exo_mesh_mlx.ghost import MlxGhostStage
from exo_mesh_mlx.grouping import MAX_GROUPED_ROWS, MAX_GROUPED_TOKENS, MIN_POSITIONS, group_rows, waves
from exo_mesh_mlx.packets import Group

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import StageInput
from tools.architectures.mlx_configs import tiny_config
from tools.architectures.mlx_models import compute_alone, write_checkpoint
from tools.architectures.sizes import LAYERS
from tools.architectures.trials import SCHEDULES, TOKENS
from tools.stages import Stages, forward, insert

CUT = 2

TOGETHER = {
    "qwen3": "keys and values; only attention goes row by row",
    "gemma3_text": "windows that wrap",
    "deepseek_v3": "latents with which model code computes; whole attention modules go row by row",
    "qwen3_next": "recurrent states beside keys and values",
    "gemma4": "layers that use the keys and values of others",
    "gpt2": "positions that model code computes from an array of offsets",
    "longcat_flash_ngram": "the last few token ids, which are fewer at the beginning of a sequence",
}


class Model:
    """Two stages of a tiny model, its sequences as mlx-lm computes them alone, and how often a stage ran."""

    def __init__(self, directory: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model_dir = write_checkpoint(directory, tiny_config(architecture))
        self.alone = compute_alone(model_dir)
        self.stages = Stages(provider, model_dir, LAYERS, batch_attention="off")
        self.engines = self.stages.ring((CUT,))
        self.rows_per_forward: list[int] = []
        run = MlxGhostStage.forward

        def counted(stage: MlxGhostStage, tokens: Any, *args: Any) -> Any:
            self.rows_per_forward.append(tokens.shape[0])
            return run(stage, tokens, *args)

        monkeypatch.setattr(engine_module.MlxGhostStage, "forward", counted)

    def prefill(self) -> None:
        insert(self.engines, range(1, len(self.alone) + 1))
        for sequence, schedule in enumerate(SCHEDULES, 1):
            for pos0, n in schedule[:2]:
                forward(self.engines, [Row(sequence, pos0, n)], TOKENS[sequence - 1, pos0 : pos0 + n])
        self.rows_per_forward.clear()

    def decode(self, steps: dict[int, int]) -> np.ndarray:
        """One frame with a decode row per {sequence: its step}."""
        rows = [Row(sequence, *self.schedule(sequence, step), 1) for sequence, step in steps.items()]
        ids = [TOKENS[row.sequence - 1, row.pos0] for row in rows]
        return forward(self.engines, rows, ids)

    def schedule(self, sequence: int, step: int) -> tuple[int, int]:
        return SCHEDULES[sequence - 1][2 + step]

    def expected(self, steps: dict[int, int]) -> np.ndarray:
        return np.stack([self.alone[one - 1][self.schedule(one, step)[0]] for one, step in steps.items()])


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Model] = []

    def new(architecture: str) -> Model:
        made.append(Model(tmp_path, architecture, monkeypatch))
        return made[-1]

    yield new
    for model in made:
        model.stages.close()


SELDOM = ("gemma4", "gpt2", "longcat_flash_ngram")


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.extended if name in SELDOM else ()) for name in TOGETHER],
)
def test_sequences_come_and_go_at_every_frame(make: Any, architecture: str) -> None:
    model = make(architecture)
    model.prefill()
    frames = [{1: 0, 2: 0, 3: 0}, {1: 1, 3: 1}, {2: 1}, {3: 2, 2: 2, 1: 2}, {2: 3, 1: 3}]
    for frame in frames:
        np.testing.assert_array_equal(model.decode(frame), model.expected(frame), err_msg=str(frame))
    assert model.rows_per_forward == [len(frame) for frame in frames for _ in model.engines]


def test_a_model_that_does_not_allow_it_goes_row_by_row(make: Any) -> None:
    model = make("llama4")  # makes its masks by itself, from one offset
    model.prefill()
    frame = {1: 0, 2: 0, 3: 0}
    np.testing.assert_array_equal(model.decode(frame), model.expected(frame))
    assert model.rows_per_forward == [1] * 6


def test_model_code_that_makes_the_wrong_thing_of_an_array_of_offsets_goes_row_by_row(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "as_array", lambda offsets: mx.array([offsets[0]] * len(offsets)))
    assert [engine.batched for engine in make("gpt2").engines] == [False, True]  # the second has no positions to add


def test_drafts_that_are_rejected_in_a_shared_frame_leave_no_trace(make: Any) -> None:
    model = make("qwen3")
    model.prefill()
    drafts = [Row(sequence, model.schedule(sequence, 0)[0], 4, 4) for sequence in (1, 2, 3)]
    forward(model.engines, drafts, [7] * 12)
    assert model.rows_per_forward == [3, 3]
    for step in range(2):
        frame = {1: step, 2: step, 3: step}
        np.testing.assert_array_equal(model.decode(frame), model.expected(frame))


def test_a_bad_row_between_good_ones_faults_alone(make: Any) -> None:
    model = make("qwen3")
    model.prefill()
    good = {1: 0, 3: 0}
    first, last = (Row(sequence, *model.schedule(sequence, 0), 1) for sequence in good)
    rows = (first, Row(9, 5, 1, 1), last)
    ids = (int(TOKENS[0, first.pos0]), 1, int(TOKENS[2, last.pos0]))
    tensors, faults = {}, []
    for stage in model.engines:
        output = stage.forward(StageInput(rows, ids, tensors))
        tensors, faults = dict(output.tensors), [*faults, *output.faults]
    assert {fault.sequence for fault in faults} == {9} and output.logits is not None
    np.testing.assert_array_equal(output.logits[[0, 2]], model.expected(good))
    assert not output.logits[1].any()


def test_rows_are_grouped_by_length_and_begin_alone() -> None:
    sizes = (9, 1), (MIN_POSITIONS - 1, 1), (10, 1), (8, 2), (8, MAX_GROUPED_TOKENS + 1), (13, 2)
    rows = [Row(sequence, pos0, n) for sequence, (pos0, n) in enumerate(sizes, 1)]
    indexes = range(len(rows))
    grouped = group_rows(rows, indexes, set(), True)
    assert {(group.rows, group.n) for group in grouped} == {
        ((0, 2), 1), ((1,), 1), ((3, 5), 2), ((4,), MAX_GROUPED_TOKENS + 1),
    }  # fmt: skip
    assert group_rows(rows, indexes, {1, 4}, True)[-1] == Group((5,), 2)
    assert [group.rows for group in group_rows(rows, indexes, set(), False)] == [(i,) for i in indexes]


def test_a_group_has_a_bound() -> None:
    rows = [Row(sequence, MIN_POSITIONS, 1) for sequence in range(2 * MAX_GROUPED_ROWS + 1)]
    sizes = [len(group.rows) for group in group_rows(rows, range(len(rows)), set(), True)]
    assert sizes == [MAX_GROUPED_ROWS, MAX_GROUPED_ROWS, 1]


def test_a_second_row_of_a_sequence_waits_for_the_first() -> None:
    rows = [Row(1, 0, 4), Row(2, 0, 4), Row(1, 4, 1), Row(2, 4, 1), Row(1, 5, 1)]
    assert list(waves(rows)) == [[0, 1], [2, 3], [4]]
