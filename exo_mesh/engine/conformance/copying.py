"""Checks that a copy of a sequence continues as if it had been computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.engine.conformance.fixtures import Alike
from exo_mesh.engine.conformance.stages import Stages
from exo_mesh.engine.contract import SequenceCopier, SequenceMover
from exo_mesh.errors import EngineError

__all__ = [
    "copiers",
    "test_a_copy_and_its_source_go_on_apart",
    "test_a_copy_goes_on_as_its_source_does",
    "test_a_copy_is_made_of_one_row_of_a_batch",
    "test_a_copy_of_fewer_positions_is_right_or_refused",
    "test_a_copy_replaces_what_was_there",
    "test_a_copy_stays_when_its_source_goes",
    "test_a_moved_sequence_goes_on_as_its_source_would",
    "test_a_refused_move_changes_nothing",
    "test_what_cannot_be_copied_is_refused_and_nothing_changes",
]

LENGTH = 13


@pytest.fixture
def copiers(stages: Stages) -> Stages:
    if not all(isinstance(engine, SequenceCopier) for engine in stages.engines):
        pytest.skip("the engine cannot copy sequences")
    return stages


def copy(stages: Stages, source: int, sequence: int, upto: int = LENGTH, max_tokens: int = 64) -> None:
    """Copy a sequence on every stage."""
    for engine in stages.engines:
        assert isinstance(engine, SequenceCopier)
        engine.copy(source, sequence, upto, max_tokens)


def begin(stages: Stages, *sequences: int, length: int = LENGTH) -> None:
    stages.insert(*sequences)
    for sequence in sequences:
        stages.logits([Row(sequence, 0, length)])


def decode(stages: Stages, sequence: int, pos0: int = LENGTH, ids: Sequence[int] | None = None) -> np.ndarray:
    """Decode four steps with the tokens at these positions, unless others are given."""
    given = stages.model.tokens[pos0 : pos0 + 4] if ids is None else ids
    return np.concatenate([stages.logits([Row(sequence, pos0 + i, 1, 1)], [token]) for i, token in enumerate(given)])


def test_a_copy_goes_on_as_its_source_does(copiers: Stages, alike: Alike) -> None:
    begin(copiers, 1)
    copy(copiers, 1, 2)
    assert sorted(copiers.first.sequences()) == [1, 2]
    alike(decode(copiers, 2), decode(copiers, 1))


def test_a_copy_and_its_source_go_on_apart(copiers: Stages, alike: Alike) -> None:
    """Each continues with tokens of its own, in turns, and together in one frame."""
    begin(copiers, 1, 3, 4)
    copy(copiers, 1, 2)
    others = copiers.model.tokens[100:104].tolist()
    alike(decode(copiers, 2, ids=others), decode(copiers, 3, ids=others))
    alike(decode(copiers, 1), decode(copiers, 4))
    after = LENGTH + 4
    together = copiers.logits([Row(1, after, 1, 1), Row(2, after, 1, 1)], [5, 6])
    apart = [copiers.logits([Row(sequence, after, 1, 1)], [token]) for sequence, token in ((4, 5), (3, 6))]
    alike(together, np.concatenate(apart))


def test_a_copy_is_made_of_one_row_of_a_batch(copiers: Stages, alike: Alike) -> None:
    begin(copiers, 1, 3)
    begin(copiers, 2, length=LENGTH + 4)
    rows = [Row(1, LENGTH, 1, 1), Row(2, LENGTH + 4, 1, 1)]
    copiers.logits(rows)
    copy(copiers, 1, 4, upto=LENGTH + 1)
    copiers.logits([Row(3, LENGTH, 1, 1)])
    alike(decode(copiers, 4, LENGTH + 1), decode(copiers, 3, LENGTH + 1))
    copiers.logits([Row(2, LENGTH + 5, 1, 1)])
    begin(copiers, 5, length=LENGTH + 1)
    alike(decode(copiers, 1, LENGTH + 1), decode(copiers, 5, LENGTH + 1))


@pytest.mark.parametrize("upto", [12, 6, 1, 0])
def test_a_copy_of_fewer_positions_is_right_or_refused(copiers: Stages, alike: Alike, upto: int) -> None:
    begin(copiers, 1, 4)
    try:
        copy(copiers, 1, 2, upto)
    except EngineError:
        assert not _rolls_back(copiers) and upto
    else:
        copiers.insert(3)
        if upto:
            copiers.logits([Row(3, 0, upto)])
        alike(decode(copiers, 2, upto), decode(copiers, 3, upto))
    alike(decode(copiers, 1), decode(copiers, 4))


def test_a_copy_replaces_what_was_there(copiers: Stages, alike: Alike) -> None:
    begin(copiers, 1)
    copiers.insert(2, max_tokens=20)
    copiers.logits([Row(2, 0, 20)], copiers.model.tokens[100:120])
    copy(copiers, 1, 2)
    alike(decode(copiers, 2), decode(copiers, 1))


def test_a_copy_stays_when_its_source_goes(copiers: Stages, alike: Alike) -> None:
    begin(copiers, 1, 3)
    before = [engine.memory_bytes() for engine in copiers.engines]
    copy(copiers, 1, 2)
    copiers.remove(1)
    alike(decode(copiers, 2), decode(copiers, 3))
    copiers.remove(2, 3)
    assert not any(engine.sequences() for engine in copiers.engines)
    begin(copiers, 1, 3)
    assert [engine.memory_bytes() for engine in copiers.engines] == before, "a copy leaves nothing behind"


def test_what_cannot_be_copied_is_refused_and_nothing_changes(copiers: Stages, alike: Alike) -> None:
    begin(copiers, 1, 2, 3)
    for engine in copiers.engines:
        assert isinstance(engine, SequenceCopier)
        for source, upto, max_tokens in ((99, 4, 64), (1, LENGTH + 1, 64), (1, LENGTH, LENGTH - 1), (1, -1, 64)):
            for sequence in (2, 50):
                with pytest.raises(EngineError):
                    engine.copy(source, sequence, upto, max_tokens)
    assert sorted(copiers.first.sequences()) == [1, 2, 3]
    alike(decode(copiers, 2), decode(copiers, 3))


def movers(stages: Stages) -> Sequence[SequenceMover]:
    """The engines of all stages, which can move sequences; else the test is skipped."""
    found: Sequence[SequenceMover] = [engine for engine in stages.engines if isinstance(engine, SequenceMover)]
    if len(found) < len(stages.engines):
        pytest.skip("the engine cannot move sequences")
    return found


@pytest.mark.parametrize("upto", [LENGTH, 6, 1])
def test_a_moved_sequence_goes_on_as_its_source_would(copiers: Stages, alike: Alike, upto: int) -> None:
    if upto < LENGTH and not _rolls_back(copiers):
        pytest.skip("its KV cannot be cut back")
    begin(copiers, 1, 4)
    begin(copiers, 3, length=upto)
    for engine in movers(copiers):
        engine.move(1, 2, upto, 64)
    assert sorted(copiers.first.sequences()) == [2, 3, 4]
    alike(decode(copiers, 2, upto), decode(copiers, 3, upto))
    copiers.remove(2)
    begin(copiers, 1, length=LENGTH)
    alike(decode(copiers, 1), decode(copiers, 4))


def test_a_refused_move_changes_nothing(copiers: Stages, alike: Alike) -> None:
    begin(copiers, 1, 2, 3)
    for engine in movers(copiers):
        for source, upto, max_tokens in ((99, 4, 64), (1, LENGTH + 1, 64), (1, LENGTH, LENGTH - 1), (1, -1, 64)):
            with pytest.raises(EngineError):
                engine.move(source, 2, upto, max_tokens)
    assert sorted(copiers.first.sequences()) == [1, 2, 3]
    alike(decode(copiers, 2), decode(copiers, 3))


def _rolls_back(stages: Stages) -> bool:
    return all(engine.capabilities.cuts_anywhere for engine in stages.engines)
