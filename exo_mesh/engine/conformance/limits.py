"""Checks that a sequence may use the room that was made for it, and no more."""

from __future__ import annotations

from exo_mesh.domain.frame import Row
from exo_mesh.engine.conformance.stages import CONTEXT, Stages

__all__ = ["test_a_sequence_may_be_as_long_as_the_context", "test_a_sequence_may_fill_its_room_and_no_more"]


def test_a_sequence_may_fill_its_room_and_no_more(stages: Stages) -> None:
    stages.insert(1, 2, max_tokens=12)
    stages.logits([Row(1, 0, 12, 1)])
    stages.logits([Row(2, 0, 11, 1)])
    assert {(fault.sequence, fault.code) for fault in stages.forward([Row(1, 12, 1, 1)]).faults} == {(1, "bad_row")}
    assert {fault.sequence for fault in stages.forward([Row(2, 11, 2, 1)]).faults} == {2}
    stages.logits([Row(2, 11, 1, 1)])


def test_a_sequence_may_be_as_long_as_the_context(stages: Stages) -> None:
    stages.insert(1, max_tokens=CONTEXT)
    stages.logits([Row(1, 0, CONTEXT - 1)])
    stages.logits([Row(1, CONTEXT - 1, 1, 1)])
    assert stages.forward([Row(1, CONTEXT, 1, 1)], [5]).faults
