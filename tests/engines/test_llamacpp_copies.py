"""Copies and moves of sequences of llama.cpp models whose state is more than keys and values of all positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import SequenceCopier, SequenceMover, StageEngine, StageInput
from exo_mesh.errors import EngineError
from tests.engines.serving_ways import LLAMACPP, write_model
from tests.support.exactness import rms
from tests.support.serving import load_stages

PROMPT = tuple(np.random.default_rng(3).integers(3, 60, 90).tolist())
"""Longer than the windows of 16 positions."""

SLACK = 0.01
"""Largest difference, relative to the rms of the logits: the library's GELU is a table of float16. A state without the
positions of its window differs by 4."""


@pytest.fixture(params=["gemma3", "mamba2"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StageEngine]:
    way = replace(LLAMACPP, architecture=request.param)
    if not way.is_installed:
        pytest.skip("xllamacpp is not installed")
    (stage,) = load_stages("llamacpp", write_model(way, tmp_path), (), way.options)
    yield stage
    stage.close()


def compute(stage: StageEngine, *rows: Row) -> np.ndarray:
    """The logits of the last position of each row."""
    tokens = tuple(token for row in rows for token in PROMPT[row.pos0 : row.pos0 + row.n])
    made = stage.forward(StageInput(rows, tokens, {}))
    assert made.logits is not None and not made.faults
    return made.logits


def test_a_copy_of_a_whole_sequence_continues_as_the_original(whole: StageEngine) -> None:
    assert not whole.capabilities.cuts_anywhere and isinstance(whole, SequenceCopier)
    whole.insert(1, 200)
    compute(whole, Row(1, 0, 60, 1))
    whole.copy(1, 2, 60, 200)
    one, other = compute(whole, Row(1, 60, 30, 1)), compute(whole, Row(2, 60, 30, 1))
    assert np.abs(one - other).max() <= SLACK * rms(one)


def test_a_copy_of_a_part_of_a_sequence_is_refused(whole: StageEngine) -> None:
    """It would continue without some positions of its windows."""
    assert isinstance(whole, SequenceCopier) and isinstance(whole, SequenceMover)
    whole.insert(1, 200)
    compute(whole, Row(1, 0, 60, 1))
    for make in (whole.copy, whole.move):
        with pytest.raises(EngineError, match="cannot go back from position 60 to 57"):
            make(1, 2, 57, 200)
    assert list(whole.sequences()) == [1]
    compute(whole, Row(1, 60, 1, 1))


def test_a_sequence_moves_to_another_number(whole: StageEngine) -> None:
    assert isinstance(whole, SequenceMover)
    for sequence in (1, 2):
        whole.insert(sequence, 200)
        compute(whole, Row(sequence, 0, 60, 1))
    before = whole.memory_bytes()
    whole.move(1, 3, 60, 150)
    assert whole.memory_bytes() == before and set(whole.sequences()) == {2, 3}
    one, other = compute(whole, Row(2, 60, 30, 1)), compute(whole, Row(3, 60, 30, 1))
    assert np.abs(one - other).max() <= SLACK * rms(one)


def test_prompts_that_begin_in_one_frame_find_room_together(whole: StageEngine) -> None:
    whole.insert(0, 200)
    alone = compute(whole, Row(0, 0, 20, 1))
    for count in (2, 5, 9):
        for number in range(1, count + 1):
            whole.insert(number, 200)
        together = compute(whole, *(Row(number, 0, 20, 1) for number in range(1, count + 1)))
        assert np.abs(together - alone).max() <= SLACK * rms(alone)
        for number in range(1, count + 1):
            whole.remove(number)
