"""Checks that a sequence's result does not depend on the other sequences or on the chunks of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.engine.conformance.fixtures import Alike
from exo_mesh.engine.conformance.stages import Stages

__all__ = [
    "alone",
    "test_how_a_prompt_is_cut_into_chunks_does_not_matter",
    "test_sequences_of_different_lengths_decode_together_as_alone",
    "test_sequences_that_join_and_leave_do_not_disturb_the_others",
    "test_verifying_drafts_together_is_as_alone",
]

LENGTHS = {1: 3, 2: 9, 3: 17, 4: 30}
"""Positions that each sequence holds before it decodes."""
STEPS = 4


def prefill(stages: Stages, sequences: Sequence[int]) -> None:
    """Bring sequences to their LENGTHS, each with a prompt of its own (its tokens start at another offset)."""
    stages.insert(*sequences)
    for sequence in sequences:
        stages.logits([Row(sequence, 0, LENGTHS[sequence])], own_ids(stages, sequence, 0, LENGTHS[sequence]))


def own_ids(stages: Stages, sequence: int, pos0: int, n: int) -> np.ndarray:
    return stages.model.tokens[40 * sequence + pos0 : 40 * sequence + pos0 + n]


def step(stages: Stages, lengths: Mapping[int, int], n: int = 1) -> np.ndarray:
    """Compute one frame with n tokens of each sequence at its length; returns the logits of all of them."""
    rows = [Row(sequence, length, n, n) for sequence, length in lengths.items()]
    ids = np.concatenate([own_ids(stages, sequence, length, n) for sequence, length in lengths.items()])
    return stages.logits(rows, ids)


@pytest.fixture
def alone(stages: Stages) -> dict[int, np.ndarray]:
    """Float32 `[STEPS, vocab]` of each sequence, decoded with no other sequence on the stages."""
    found: dict[int, np.ndarray] = {}
    for sequence, length in LENGTHS.items():
        prefill(stages, [sequence])
        found[sequence] = np.concatenate([step(stages, {sequence: length + index}) for index in range(STEPS)])
        stages.clear()
    return found


def test_sequences_of_different_lengths_decode_together_as_alone(
    stages: Stages, alone: Mapping[int, np.ndarray], alike: Alike
) -> None:
    prefill(stages, list(LENGTHS))
    for index in range(STEPS):
        got = step(stages, {sequence: length + index for sequence, length in LENGTHS.items()})
        alike(got, np.stack([alone[sequence][index] for sequence in LENGTHS]))


def test_sequences_that_join_and_leave_do_not_disturb_the_others(
    stages: Stages, alone: Mapping[int, np.ndarray], alike: Alike
) -> None:
    """The members of the frame, by step: 1 and 2; then 4, 1 and 2; then 2 and 4; then 4 and 3 and 2 in another
    order."""
    done = dict.fromkeys(LENGTHS, 0)
    prefill(stages, [1, 2])
    for members in ((1, 2), (4, 1, 2), (2, 4), (4, 3, 2)):
        prefill(stages, [sequence for sequence in members if sequence not in stages.first.sequences()])
        got = step(stages, {sequence: LENGTHS[sequence] + done[sequence] for sequence in members})
        alike(got, np.stack([alone[sequence][done[sequence]] for sequence in members]))
        for sequence in members:
            done[sequence] += 1
        if members == (4, 1, 2):
            stages.remove(1)


def test_verifying_drafts_together_is_as_alone(stages: Stages, alone: Mapping[int, np.ndarray], alike: Alike) -> None:
    prefill(stages, list(LENGTHS))
    alike(step(stages, LENGTHS, n=STEPS), np.concatenate([alone[sequence] for sequence in LENGTHS]))


def test_how_a_prompt_is_cut_into_chunks_does_not_matter(stages: Stages, alike: Alike) -> None:
    ways: list[np.ndarray] = []
    for sequence, chunks in enumerate(((24,), (8, 8, 8), (5, 19), (1,) * 24, (23, 1)), 1):
        stages.insert(sequence)
        logits: list[np.ndarray] = []
        for chunk, pos0 in zip(chunks, np.cumsum((0, *chunks)).tolist(), strict=False):
            logits.append(stages.logits([Row(sequence, pos0, chunk, chunk)]))
        ways.append(np.concatenate([*logits, stages.logits([Row(sequence, 24, 1, 1)])]))
    for way in ways[1:]:
        alike(way, ways[0])
