"""Checks that a sequence goes back to an earlier position as far as the engine declares, and never to a wrong
result."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.engine.conformance.fixtures import Alike
from exo_mesh.engine.conformance.schedules import DraftedSequence, prefill, run_drafts, without_drafts
from exo_mesh.engine.conformance.stages import CONTEXT, Stages
from exo_mesh.engine.contract import ANY_POSITION

__all__ = [
    "test_a_sequence_can_begin_anew_at_position_0",
    "test_drafts_and_refusals_leave_no_trace",
    "test_each_row_of_a_batch_goes_back_by_its_own_length",
    "test_going_back_forgets_what_was_there_or_is_refused",
    "test_going_back_is_refused_by_an_engine_that_cannot",
]


def rollback_of(stages: Stages) -> int:
    """How many of the last positions all stages can cut back."""
    return min(engine.capabilities.rollback for engine in stages.engines)


def test_a_sequence_can_begin_anew_at_position_0(stages: Stages, alike: Alike) -> None:
    stages.insert(1)
    first = stages.logits([Row(1, 0, 6, 6)])
    alike(stages.logits([Row(1, 0, 6, 6)]), first)


@pytest.mark.parametrize("pos0", [13, 10, 7, 1])
def test_going_back_forgets_what_was_there_or_is_refused(stages: Stages, alike: Alike, pos0: int) -> None:
    stages.insert(1, 2)
    stages.logits([Row(1, 0, 10, 1)])
    stages.logits([Row(1, 10, 4, 4)], stages.model.tokens[40:44])
    output = stages.forward([Row(1, pos0, 5, 1)])
    if output.faults:
        assert rollback_of(stages) < ANY_POSITION, output.faults
        return
    stages.logits([Row(2, 0, 10, 1)])
    if pos0 > 10:
        stages.logits([Row(2, 10, pos0 - 10)], stages.model.tokens[40 : 40 + pos0 - 10])
        want = stages.logits([Row(2, pos0, 5, 1)])
    else:
        stages.insert(3)
        stages.logits([Row(3, 0, pos0)])
        want = stages.logits([Row(3, pos0, 5, 1)])
    assert output.logits is not None
    alike(output.logits, want)


def test_going_back_is_refused_by_an_engine_that_cannot(stages: Stages, alike: Alike) -> None:
    if rollback_of(stages):
        pytest.skip("the engine can go back")
    stages.insert(1, 2)
    stages.logits([Row(1, 0, 10), Row(2, 0, 10)])
    assert {fault.sequence for fault in stages.forward([Row(1, 7, 2, 1)]).faults} == {1}
    alike(stages.logits([Row(1, 10, 1, 1)]), stages.logits([Row(2, 10, 1, 1)]))


def test_each_row_of_a_batch_goes_back_by_its_own_length(stages: Stages, alike: Alike) -> None:
    """After the verification of drafts: each sequence tried 4 drafts, and 1, 2 and 3 of them were accepted."""
    if rollback_of(stages) < ANY_POSITION:
        pytest.skip("the engine does not declare rollback to any position")
    accepted = {1: 1, 2: 2, 3: 3}
    stages.insert(*accepted, *(sequence + 10 for sequence in accepted))
    for sequence in accepted:
        stages.logits([Row(sequence, 0, 5 + sequence)])
    tried = [Row(sequence, 5 + sequence, 4, 4) for sequence in accepted]
    stages.logits(tried, stages.model.tokens[100:112])
    rows = [Row(sequence, 5 + sequence + keep, 1, 1) for sequence, keep in accepted.items()]
    got = stages.logits(rows)
    want: list[np.ndarray] = []
    for index, (sequence, keep) in enumerate(accepted.items()):
        stages.logits([Row(sequence + 10, 0, 5 + sequence)])
        drafts = stages.model.tokens[100 + 4 * index : 100 + 4 * index + keep]
        stages.logits([Row(sequence + 10, 5 + sequence, keep)], drafts)
        want.append(stages.logits([Row(sequence + 10, 5 + sequence + keep, 1, 1)]))
    alike(got, np.concatenate(want))


@pytest.mark.parametrize("seed", range(3))
def test_drafts_and_refusals_leave_no_trace(stages: Stages, alike: Alike, seed: int) -> None:
    """Rows and chains of rows with drafts, of sequences that share frames; refused drafts, and rows that come again."""
    if not rollback_of(stages):
        pytest.skip("the engine cannot go back")
    rng = Random(seed)
    starts = dict(enumerate(rng.sample(range(0, CONTEXT - 100, 7), 3), 1))
    prompts = {sequence: rng.choice([1, 9, 40]) for sequence in starts}
    tokens = stages.model.tokens.tolist()
    given = {
        sequence: (tokens[start : start + prompts[sequence] + 20], prompts[sequence])
        for sequence, start in starts.items()
    }
    stages.insert(*given)
    want = without_drafts(given, stages.logits)
    stages.clear()
    stages.insert(*given)
    prefill(given, stages.logits)
    drafted = [DraftedSequence(sequence, ids, prompt, want[sequence]) for sequence, (ids, prompt) in given.items()]
    declared = [engine.capabilities for engine in stages.engines]
    run_drafts(drafted, stages.logits, alike, declared, rng=rng, vocab_size=stages.model.vocab_size)
    assert sum(sequence.refusals for sequence in drafted)
