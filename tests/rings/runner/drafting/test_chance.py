"""Whatever is drafted, the text is what it is without drafts."""

from __future__ import annotations

import os

import pytest

from tests.support.drafting import play

SCHEDULES = 120
FIRST_SLOW = 10_000
SHARES = 10


@pytest.mark.parametrize("part", range(4))
def test_drafts_by_chance_change_no_answer(part: int) -> None:
    accepted = refused = 0
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        expected, said, ring = play(seed)
        assert said == expected, f"seed {seed}"
        scheduler = ring.driver._scheduler
        assert not (scheduler.num_running or scheduler.num_waiting or scheduler.num_held or scheduler._decodes), seed
        kept = {kept.id for kept in ring.driver.prefix._kept.values()}
        assert set(ring.engine.kv) <= kept, seed
        accepted += sum(ring.driver.drafts.tally.accepted)
        refused += sum(ring.driver.drafts.tally.rejected)
    assert accepted > 100 and refused > 100


def test_an_evicted_sequence_whose_draft_is_refused_is_computed_from_its_beginning() -> None:
    """With log-probabilities of its prompt: its long row was taken for one of these in this schedule."""
    expected, said, _ = play(11060)
    assert said == expected


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SHARES))
def test_thousands_of_schedules_change_no_answer(part: int) -> None:
    """EXO_MESH_TEST_SCHEDULES: of all parts."""
    count = int(os.environ.get("EXO_MESH_TEST_SCHEDULES", "5000")) // SHARES
    for seed in range(FIRST_SLOW + part * count, FIRST_SLOW + (part + 1) * count):
        expected, said, _ = play(seed)
        assert said == expected, f"seed {seed}"
