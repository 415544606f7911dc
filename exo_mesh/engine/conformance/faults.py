"""Checks that a row which cannot be computed is a fault of its own sequence, and of no other."""

from __future__ import annotations

import numpy as np
import pytest

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.engine.conformance.fixtures import Alike
from exo_mesh.engine.conformance.stages import Stages
from exo_mesh.engine.contract import EngineProvider, StageInput
from exo_mesh.errors import EngineError

__all__ = [
    "test_a_bad_row_is_a_fault_of_its_sequence_only",
    "test_a_fault_leaves_the_sequence_as_it_was",
    "test_a_token_id_outside_the_vocabulary_is_a_fault_of_its_sequence_only",
    "test_activations_that_do_not_fit_are_an_engine_error",
    "test_an_engine_that_is_not_loaded_says_so",
    "test_when_every_row_is_bad_every_sequence_has_a_fault",
]


def faulted(faults: tuple[Fault, ...]) -> set[tuple[int, str]]:
    return {(fault.sequence, fault.code) for fault in faults}


@pytest.mark.parametrize(
    "bad",
    [Row(1, 7, 2, 1), Row(99, 0, 2, 1), Row(1, 4, 9, 1)],
    ids=["a gap", "an unknown sequence", "more than was inserted for"],
)
def test_a_bad_row_is_a_fault_of_its_sequence_only(stages: Stages, alike: Alike, bad: Row) -> None:
    stages.insert(1, max_tokens=12)
    stages.insert(2, 3)
    stages.logits([Row(1, 0, 4), Row(2, 0, 4), Row(3, 0, 4)])
    rows = [bad, Row(2, 4, bad.n, 1)]
    output = stages.forward(rows)
    assert faulted(output.faults) == {(bad.sequence, "bad_row")}
    assert all(fault.message for fault in output.faults)
    assert output.logits is not None
    assert output.logits.shape == (2, stages.model.vocab_size)
    assert np.isfinite(output.logits).all()
    alike(output.logits[1:], stages.logits([Row(3, 4, bad.n, 1)]))


@pytest.mark.parametrize("wrong", ["the vocabulary's size", "a negative one", "a huge one"])
def test_a_token_id_outside_the_vocabulary_is_a_fault_of_its_sequence_only(
    stages: Stages, alike: Alike, wrong: str
) -> None:
    ids = {"the vocabulary's size": stages.model.vocab_size, "a negative one": -1, "a huge one": 2**31 - 1}
    stages.insert(1, 2, 3)
    output = stages.forward([Row(1, 0, 2, 1), Row(2, 0, 2, 1)], [5, ids[wrong], *stages.ids([Row(2, 0, 2)])])
    assert faulted(output.faults) == {(1, "bad_row")}
    assert output.logits is not None
    alike(output.logits[1:], stages.logits([Row(3, 0, 2, 1)]))


def test_when_every_row_is_bad_every_sequence_has_a_fault(stages: Stages) -> None:
    stages.insert(1)
    output = stages.forward([Row(1, 3, 1, 1), Row(2, 0, 1, 1)])
    assert faulted(output.faults) == {(1, "bad_row"), (2, "bad_row")}
    assert output.logits is not None
    assert output.logits.shape == (2, stages.model.vocab_size)


def test_a_fault_leaves_the_sequence_as_it_was(stages: Stages, alike: Alike) -> None:
    stages.insert(1, 2)
    stages.logits([Row(1, 0, 4), Row(2, 0, 4)])
    assert stages.forward([Row(1, 9, 1, 1)]).faults
    assert stages.forward([Row(1, 4, 1, 1)], [stages.model.vocab_size]).faults
    alike(stages.logits([Row(1, 4, 1, 1)]), stages.logits([Row(2, 4, 1, 1)]))


def test_activations_that_do_not_fit_are_an_engine_error(stages: Stages) -> None:
    if len(stages.engines) == 1:
        pytest.skip("this model runs in one piece only")
    stages.insert(1)
    three, two = (Row(1, 0, 3),), (Row(1, 0, 2, 1),)
    hidden = stages.first.forward(StageInput(three, stages.ids(three), {}))
    with pytest.raises(EngineError, match="expected"):
        stages.last.forward(StageInput(two, stages.ids(two), hidden.tensors))
    with pytest.raises(EngineError):
        stages.last.forward(StageInput(two, stages.ids(two), {}))


def test_an_engine_that_is_not_loaded_says_so(engine_provider: EngineProvider) -> None:
    with pytest.raises(EngineError, match="not loaded"):
        engine_provider.create().forward(StageInput((Row(1, 0, 1, 1),), (5,), {}))
