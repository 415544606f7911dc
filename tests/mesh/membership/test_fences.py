"""What is remembered of deleted instances."""

from __future__ import annotations

import itertools

import pytest

from exo_mesh.domain.plan import NO_BALLOT, Ballot
from exo_mesh.mesh.membership.fences import FENCE_S, MAX_FENCES, Fence, Fences


def fence(name: str = "m-1", counter: int = 1, proposer: str = "a", left_s: float = FENCE_S) -> Fence:
    return Fence(name, Ballot(counter, proposer), left_s)


def test_fences_merge_in_any_order_to_the_same_sum() -> None:
    told = [fence("m-1", 1), fence("m-1", 3), fence("m-1", 2), fence("n-1", 1)]
    sums = set()
    for order in itertools.permutations(told):
        fences = Fences()
        for one in order:
            fences.add(one, 0.0)
        sums.add(fences.sum)
        assert fences.ballot("m-1") == Ballot(3, "a") and len(fences) == 2
    assert len(sums) == 1


def test_a_fence_covers_ballots_up_to_its_own_and_is_new_once() -> None:
    fences = Fences()
    assert fences.add(fence(counter=5), 10.0) and not fences.add(fence(counter=5), 20.0)
    assert fences.covers("m-1", Ballot(5, "a")) and not fences.covers("m-1", Ballot(5, "b"))
    assert fences.ballot("other-1") == NO_BALLOT
    assert fences.noted_since("m-1", 10.0) and not fences.noted_since("m-1", 11.0)


def test_a_fence_is_forgotten_after_a_day_and_not_learnt_again_from_a_slower_peer() -> None:
    fences = Fences()
    fences.add(fence(), 0.0)
    assert [one.left_s for one in fences.all(FENCE_S - 1)] == [1.0]
    fences.expire(FENCE_S)
    assert (len(fences), fences.sum) == (0, 0)


def test_a_flood_of_deletions_stays_bounded_and_drops_the_oldest() -> None:
    fences = Fences()
    for n in range(MAX_FENCES + 5):
        fences.add(fence(f"m-{n}"), float(n))
    assert len(fences) == MAX_FENCES and fences.ballot("m-4") == NO_BALLOT and fences.ballot("m-5") != NO_BALLOT


@pytest.mark.parametrize(
    "odd", [fence(""), fence("x" * 200), fence(proposer=""), fence(counter=2**63), fence(left_s=0), fence(left_s=1e9)]
)
def test_what_is_out_of_range_is_not_taken(odd: Fence) -> None:
    assert not Fences().add(odd, 0.0)
