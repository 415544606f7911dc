"""How long a ring that failed a request is left alone."""

from __future__ import annotations

from exo_mesh.rings.placing.avoided_rings import DISTRUST_S, Distrust
from tests.rings.placing.test_ownership import an_instance


def test_a_ring_that_failed_is_distrusted_for_a_while_and_then_gets_another_chance() -> None:
    distrust, ring = Distrust(), an_instance(2, "a", "a")
    assert not distrust.includes(ring, 0.0)
    distrust.note(ring, 0.0)
    assert distrust.includes(ring, DISTRUST_S - 0.01)
    assert not distrust.includes(ring, DISTRUST_S)
    distrust.note(ring, 100.0)
    distrust.note(ring, 130.0)
    assert distrust.includes(ring, 100.0 + DISTRUST_S), "it failed again meanwhile"


def test_only_what_failed_and_what_is_older_is_distrusted() -> None:
    distrust = Distrust()
    distrust.note(an_instance(2, "b", "a"), 0.0)
    assert distrust.includes(an_instance(2, "a", "a"), 1.0)
    assert not distrust.includes(an_instance(3, "a", "a"), 1.0), "placed or adopted anew"
    assert not distrust.includes(an_instance(1, "a", "a", name="m-2"), 1.0), "another one"
    distrust.note(an_instance(1, "a", "a"), 2.0)
    assert distrust.includes(an_instance(2, "a", "a"), 3.0), "a late failure of an older plan takes nothing back"


def test_what_is_remembered_is_bounded_by_time() -> None:
    distrust = Distrust()
    for number in range(10_000):
        distrust.note(an_instance(1, "a", "a", name=f"m-{number}"), float(number))
    assert len(distrust._failed) <= DISTRUST_S
