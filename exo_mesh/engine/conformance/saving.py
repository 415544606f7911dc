"""Checks that a saved sequence continues in other stages as if it had always been there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.conformance.fixtures import Alike
from exo_mesh.engine.conformance.stages import CutModel, Stages
from exo_mesh.engine.contract import PartSaver, SavedSequence, SequenceSaver
from exo_mesh.errors import EngineError

__all__ = [
    "others",
    "savers",
    "test_a_restored_sequence_can_be_cut_back",
    "test_a_saved_sequence_goes_on_in_other_stage_objects",
    "test_an_unknown_sequence_cannot_be_saved",
    "test_parts_are_together_what_is_saved_at_once",
    "test_restoring_replaces_what_was_there",
    "test_saving_copies_and_changes_nothing",
    "test_tensors_that_do_not_fit_are_refused_and_nothing_changes",
]


@dataclass(frozen=True)
class Saver:
    """Stages whose engines can all save and restore."""

    stages: Stages

    @property
    def parts(self) -> list[SequenceSaver]:
        found: list[SequenceSaver] = [engine for engine in self.stages.engines if isinstance(engine, SequenceSaver)]
        assert len(found) == len(self.stages.engines)
        return found

    def save(self, sequence: int) -> list[SavedSequence]:
        return [part.save(sequence) for part in self.parts]

    def restore(self, sequence: int, saved: list[SavedSequence], max_tokens: int = 64) -> None:
        for part, one in zip(self.parts, saved, strict=True):
            part.restore(sequence, max_tokens, one)


@pytest.fixture
def savers(stages: Stages) -> Saver:
    if not all(isinstance(engine, SequenceSaver) for engine in stages.engines):
        pytest.skip("the engine cannot save and restore sequences")
    return Saver(stages)


@pytest.fixture(scope="module")
def others(model: CutModel) -> Iterator[Saver]:
    """The same split again, in separate objects."""
    with model.cut(model.middle) as stages:
        yield Saver(stages)


def decode(stages: Stages, sequence: int, pos0: int, steps: int = 4) -> np.ndarray:
    return np.concatenate([stages.logits([Row(sequence, pos0 + index, 1, 1)]) for index in range(steps)])


def test_a_saved_sequence_goes_on_in_other_stage_objects(savers: Saver, others: Saver, same_work: Alike) -> None:
    savers.stages.insert(1)
    savers.stages.logits([Row(1, 0, 13)])
    saved = savers.save(1)
    assert [one.length for one in saved] == [13] * len(saved)
    others.stages.clear()
    others.restore(7, saved)
    assert list(others.stages.first.sequences()) == [7]
    same_work(decode(others.stages, 7, 13), decode(savers.stages, 1, 13))


def test_saving_copies_and_changes_nothing(savers: Saver, alike: Alike) -> None:
    savers.stages.insert(1, 2)
    savers.stages.logits([Row(1, 0, 13), Row(2, 0, 13)])
    saved = savers.save(1)
    kept = [{name: bytes(tensor.data) for name, tensor in one.tensors.items()} for one in saved]
    alike(decode(savers.stages, 1, 13), decode(savers.stages, 2, 13))
    assert kept == [{name: bytes(tensor.data) for name, tensor in one.tensors.items()} for one in saved]


def test_restoring_replaces_what_was_there(savers: Saver, alike: Alike) -> None:
    savers.stages.insert(1, 2)
    savers.stages.logits([Row(1, 0, 13)])
    savers.stages.logits([Row(2, 0, 20)], savers.stages.model.tokens[100:120])
    savers.restore(2, savers.save(1))
    alike(decode(savers.stages, 2, 13), decode(savers.stages, 1, 13))


def test_a_restored_sequence_can_be_cut_back(savers: Saver, others: Saver, alike: Alike) -> None:
    if not all(engine.capabilities.cuts_anywhere for engine in savers.stages.engines):
        pytest.skip("the engine does not declare rollback to any position")
    savers.stages.insert(1)
    savers.stages.logits([Row(1, 0, 13)])
    others.stages.clear()
    others.restore(1, savers.save(1))
    alike(decode(others.stages, 1, 6), decode(savers.stages, 1, 6))


def test_an_unknown_sequence_cannot_be_saved(savers: Saver) -> None:
    for part in savers.parts:
        with pytest.raises(EngineError, match="99"):
            part.save(99)


def test_parts_are_together_what_is_saved_at_once(savers: Saver) -> None:
    engines = [engine for engine in savers.stages.engines if isinstance(engine, PartSaver)]
    if len(engines) < len(savers.parts):
        pytest.skip("the engine saves sequences only at once")
    savers.stages.insert(1, 2)
    savers.stages.logits([Row(1, 0, 13), Row(2, 0, 13)])
    wanted = savers.save(1)
    for engine, whole in zip(engines, wanted, strict=True):
        parts = engine.save_parts(1)
        got = [next(parts)]
        decode(savers.stages, 2, 13, 2)
        got += parts
        assert {part.length for part in got} == {13}
        found = {name: tensor for part in got for name, tensor in part.tensors.items()}
        assert sum(len(part.tensors) for part in got) == len(found)
        assert {name: (one.shape, bytes(one.data)) for name, one in found.items()} == {
            name: (one.shape, bytes(one.data)) for name, one in whole.tensors.items()
        }
        with pytest.raises(EngineError, match="99"):
            next(engine.save_parts(99))


def _without_one(saved: SavedSequence) -> SavedSequence:
    return SavedSequence(saved.length, dict(list(saved.tensors.items())[1:]))


def _one_too_many(saved: SavedSequence) -> SavedSequence:
    return SavedSequence(saved.length, {**saved.tensors, "surplus": Tensor.from_numpy(np.zeros(3, np.float32))})


def _other_shape(saved: SavedSequence) -> SavedSequence:
    name, tensor = next(iter(saved.tensors.items()))
    return SavedSequence(saved.length, {**saved.tensors, name: Tensor(tensor.dtype, (*tensor.shape, 1), tensor.data)})


def _other_dtype(saved: SavedSequence) -> SavedSequence:
    name, tensor = next(iter(saved.tensors.items()))
    return SavedSequence(
        saved.length, {**saved.tensors, name: Tensor("uint8", (tensor.num_bytes,), bytes(tensor.data))}
    )


def _other_length(saved: SavedSequence) -> SavedSequence:
    return SavedSequence(saved.length + 1, saved.tensors)


def _negative_length(saved: SavedSequence) -> SavedSequence:
    return SavedSequence(-1, saved.tensors)


@pytest.mark.parametrize(
    "spoil", [_without_one, _one_too_many, _other_shape, _other_dtype, _other_length, _negative_length]
)
def test_tensors_that_do_not_fit_are_refused_and_nothing_changes(
    savers: Saver, alike: Alike, spoil: Callable[[SavedSequence], SavedSequence]
) -> None:
    savers.stages.insert(1, 2)
    savers.stages.logits([Row(1, 0, 13), Row(2, 0, 13)])
    for part, saved in zip(savers.parts, savers.save(1), strict=True):
        if not saved.tensors:
            continue  # a stage that keeps nothing but lengths
        with pytest.raises(EngineError):
            part.restore(1, 64, spoil(saved))
        with pytest.raises(EngineError):
            part.restore(50, 64, spoil(saved))
    for part, saved in zip(savers.parts, savers.save(1), strict=True):
        with pytest.raises(EngineError):
            part.restore(50, saved.length - 1, saved)  # more positions than max_tokens allows
    assert sorted(savers.stages.first.sequences()) == [1, 2]
    alike(decode(savers.stages, 1, 13), decode(savers.stages, 2, 13))
