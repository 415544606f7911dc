"""Checks that each row gets the logits that it asks for."""

from __future__ import annotations

import numpy as np
import pytest

from exo_mesh.domain.frame import HIDDEN, Row
from exo_mesh.engine.conformance.fixtures import Alike
from exo_mesh.engine.conformance.stages import Stages
from exo_mesh.engine.contract import StageInput

__all__ = [
    "test_a_forward_that_wants_no_logits_gives_none_but_fills_kv",
    "test_a_frame_without_rows_is_passed_on_empty",
    "test_a_stage_before_the_last_gives_one_hidden_row_per_token",
    "test_inserting_again_changes_nothing",
    "test_logits_are_float32_for_the_last_positions_of_each_row",
    "test_rows_of_different_lengths_share_a_frame",
]


def test_logits_are_float32_for_the_last_positions_of_each_row(stages: Stages, alike: Alike) -> None:
    stages.insert(1, 2, 3)
    got = stages.logits([Row(1, 0, 5, 2), Row(2, 0, 5, 1)])
    assert got.shape == (3, stages.model.vocab_size)
    assert got.dtype == np.float32
    every = stages.logits([Row(3, 0, 5, 5)])
    alike(got, every[[3, 4, 4]])


def test_a_forward_that_wants_no_logits_gives_none_but_fills_kv(stages: Stages, alike: Alike) -> None:
    stages.insert(1, 2)
    assert stages.logits([Row(1, 0, 8)]).shape == (0, stages.model.vocab_size)
    after = stages.logits([Row(1, 8, 1, 1)])
    stages.logits([Row(2, 0, 8, 1)])
    alike(after, stages.logits([Row(2, 8, 1, 1)]))


def test_a_stage_before_the_last_gives_one_hidden_row_per_token(stages: Stages) -> None:
    if len(stages.engines) == 1:
        pytest.skip("this model runs in one piece only")
    stages.insert(1, 2)
    rows = (Row(1, 0, 3), Row(2, 0, 3))
    output = stages.first.forward(StageInput(rows, stages.ids(rows), {}))
    assert output.logits is None
    assert output.tensors[HIDDEN].shape[0] == 6


def test_a_frame_without_rows_is_passed_on_empty(stages: Stages) -> None:
    output = stages.forward([], ())
    assert output.logits is not None
    assert output.logits.shape == (0, stages.model.vocab_size)


def test_rows_of_different_lengths_share_a_frame(stages: Stages, alike: Alike) -> None:
    if not all(engine.capabilities.ragged for engine in stages.engines):
        pytest.skip("the engine does not declare ragged")
    stages.insert(1, 2, 3, 4)
    alone = [stages.logits([Row(3, 0, 9, 1)]), stages.logits([Row(4, 0, 4, 2)]), stages.logits([Row(3, 9, 1, 1)])]
    together = stages.logits([Row(1, 0, 9, 1), Row(2, 0, 4, 2)])
    alike(together, np.concatenate(alone[:2]))
    mixed = stages.logits([Row(1, 9, 1, 1), Row(2, 4, 7, 1)])
    alike(mixed[:1], alone[2])
    alike(mixed[1:], stages.logits([Row(4, 4, 7, 1)]))


def test_inserting_again_changes_nothing(stages: Stages, alike: Alike) -> None:
    stages.insert(1, 2)
    stages.logits([Row(1, 0, 4), Row(2, 0, 4)])
    stages.insert(1)
    assert sorted(stages.first.sequences()) == [1, 2]
    alike(stages.logits([Row(1, 4, 1, 1)]), stages.logits([Row(2, 4, 1, 1)]))
