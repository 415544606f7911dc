"""How long a request waits in the queue of a ring, as estimated."""

from __future__ import annotations

import pytest

from exo_mesh.rings.runner.scheduling.queue import TurnClock


def test_a_place_is_worth_what_the_turns_before_it_took() -> None:
    clock = TurnClock()
    clock.note(4, 0, now=10.0)
    assert clock.wait_s(1, now=11.0) is None, "nobody has had a turn yet"
    clock.note(3, 1, now=12.0)
    clock.note(2, 1, now=16.0)
    assert clock.wait_s(1, now=16.0) == pytest.approx(3.0)
    assert clock.wait_s(2, now=17.0) == pytest.approx(5.0)
    assert clock.wait_s(2, now=99.0) == pytest.approx(3.0), "the next turn is late; the one after takes its time"


def test_time_in_which_nobody_waits_does_not_count() -> None:
    clock = TurnClock()
    clock.note(1, 0, now=0.0)
    clock.note(0, 1, now=2.0)
    clock.note(0, 0, now=500.0)
    clock.note(1, 0, now=1000.0)
    clock.note(0, 1, now=1002.0)
    assert clock.wait_s(1, now=1002.0) == pytest.approx(2.0)


def test_several_turns_at_once_share_their_time() -> None:
    clock = TurnClock()
    clock.note(8, 0, now=0.0)
    clock.note(4, 4, now=8.0)
    assert clock.wait_s(3, now=8.0) == pytest.approx(6.0)
