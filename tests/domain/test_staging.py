"""Staged copies: the newest idle ones stay, those in use always, orphans never."""

from __future__ import annotations

import pytest

from exo_mesh.domain.on_disk import GRACE_S, StagedCopy, surplus

GIB = 2**30
NOW = 10_000.0


def copy(model: str, gib: int, age_s: float, **what: bool) -> StagedCopy:
    return StagedCopy(model, gib * GIB, NOW - age_s, **what)


COPIES = [copy("old", 10, 900), copy("new", 10, 100), copy("newer", 25, 50), copy("middle", 10, 500)]


@pytest.mark.parametrize(
    ("keep_gib", "gone"),
    [
        (55, []),
        (54, ["old"]),
        (40, ["middle", "old"]),
        (24, ["newer", "old"]),
        (1, ["newer", "new", "middle", "old"]),
        (0, ["newer", "new", "middle", "old"]),
        (None, []),
    ],
)
def test_the_newest_copies_that_fit_stay(keep_gib: int | None, gone: list[str]) -> None:
    assert surplus(COPIES, None if keep_gib is None else keep_gib * GIB, NOW) == gone


def test_a_copy_in_use_stays_and_takes_nothing_of_the_room() -> None:
    used = copy("used", 100, 10**6, is_in_use=True)
    assert surplus([used, *COPIES], 55 * GIB, NOW) == []
    assert surplus([used, copy("idle", 1, 60)], 0, NOW) == ["idle"]
    assert surplus([copy("used", 1, 60, is_in_use=True, is_orphan=True)], 0, NOW) == []


def test_a_model_that_the_store_deleted_goes_at_once() -> None:
    orphan = copy("orphan", 5, 0, is_orphan=True)
    assert surplus([orphan], None, NOW) == ["orphan"]
    assert surplus([orphan, copy("kept", 10, 60)], 10 * GIB, NOW) == ["orphan"], "it takes nothing of the room either"


def test_what_was_used_just_now_waits_for_its_plan() -> None:
    copies = [copy("fresh", 1, GRACE_S - 1), copy("idle", 1, GRACE_S)]
    assert surplus(copies, 0, NOW) == ["idle"]
    assert surplus(copies, 0, NOW + 1) == ["fresh", "idle"]
