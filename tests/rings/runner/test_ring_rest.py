"""When the ring of a runner is idle."""

from __future__ import annotations

from exo_mesh.rings.runner.ring_rest import IDLE_AFTER_S, RingRest


class Ring:
    """A ring by a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.is_busy = False
        self.uses = 0
        self.rest = RingRest(lambda: self.is_busy, self._used, lambda: self.now)

    def _used(self) -> None:
        self.uses += 1


def test_a_ring_is_idle_some_time_after_its_last_use() -> None:
    ring = Ring()
    assert not ring.rest.is_idle, "it has just begun"
    ring.now += IDLE_AFTER_S
    assert ring.rest.is_idle
    ring.rest.used()
    assert not ring.rest.is_idle
    ring.now += IDLE_AFTER_S - 1
    assert not ring.rest.is_idle
    ring.now += 1
    assert ring.rest.is_idle


def test_only_the_first_use_of_an_idle_ring_is_told() -> None:
    ring = Ring()
    ring.rest.used()
    assert ring.uses == 0
    ring.now += IDLE_AFTER_S
    ring.rest.used()
    ring.rest.used()
    assert ring.uses == 1


def test_a_ring_whose_request_stands_still_is_not_idle() -> None:
    """Its client does not read, say. The time counts again from its end."""
    ring = Ring()
    ring.is_busy = True
    for _ in range(10):
        ring.now += IDLE_AFTER_S
        assert not ring.rest.is_idle
    ring.is_busy = False
    assert not ring.rest.is_idle
    ring.now += IDLE_AFTER_S
    assert ring.rest.is_idle
