"""A whole-model instance computes a bounded number of requests at once; the others wait in a fair queue."""

from __future__ import annotations

import pytest

from exo_mesh.errors import OverloadError
from exo_mesh.rings.runner.whole.slots import Slots


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_beyond_the_slots_wait_and_follow_in_order() -> None:
    slots = Slots(1, 10, Clock())
    first, second, third = (slots.enter(name, 0, resumed=False) for name in "abc")
    assert first.has_slot and not second.has_slot and not third.has_slot
    assert [slots.place(turn)[:2] for turn in (second, third)] == [(1, 2), (2, 2)]
    slots.leave(first)
    assert second.has_slot and not third.has_slot and slots.place(third)[:2] == (1, 1)


def test_a_waiting_request_that_leaves_gives_up_its_place_only() -> None:
    slots = Slots(1, 10, Clock())
    first, second, third = (slots.enter(name, 0, resumed=False) for name in "abc")
    slots.leave(second)
    assert (slots.num_running, slots.num_waiting) == (1, 1)
    slots.leave(first)
    assert third.has_slot
    slots.leave(third)
    assert (slots.num_running, slots.num_waiting) == (0, 0)


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    clock = Clock()
    slots = Slots(1, 1, clock)
    first = slots.enter("a", 0, resumed=False)
    clock.now = 8.0
    slots.leave(first)
    slots.enter("a", 0, resumed=False)
    slots.enter("b", 0, resumed=False)
    with pytest.raises(OverloadError) as refused:
        slots.enter("c", 0, resumed=False)
    assert refused.value.retry_after_s == pytest.approx(16.0)


def test_a_request_that_was_accepted_before_is_never_refused_and_goes_first() -> None:
    slots = Slots(1, 1, Clock())
    first = slots.enter("a", 0, resumed=False)
    waiting = slots.enter("b", 0, resumed=False)
    resumed = slots.enter("c", 0, resumed=True)
    assert slots.place(resumed)[0] == 1 and slots.place(waiting)[0] == 2
    slots.leave(first)
    assert resumed.has_slot and not waiting.has_slot


def test_a_client_that_has_had_much_waits_for_one_that_has_had_little() -> None:
    slots = Slots(1, 10, Clock())
    running = slots.enter("greedy", 0, resumed=False)
    again = slots.enter("greedy", 0, resumed=False)
    other = slots.enter("modest", 0, resumed=False)
    slots.charge(running, 1000)
    slots.leave(running)
    assert other.has_slot and not again.has_slot
