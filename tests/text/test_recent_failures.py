"""Failures are remembered for a minute, by their question, and no more than a fixed number of them."""

from __future__ import annotations

import pytest

from exo_mesh.errors import InputError
from exo_mesh.text.recent_failures import KEPT_S, MAX_KEPT, RecentFailures


def test_the_same_question_fails_with_the_same_error_for_a_minute() -> None:
    now = [0.0]
    failures = RecentFailures(lambda: now[0])
    failures.recall(b"q")
    failures.note(b"q", InputError("too long", param="messages"))
    now[0] += KEPT_S
    for _ in range(2):
        with pytest.raises(InputError, match=r"^too long$") as caught:
            failures.recall(b"q")
        assert caught.value.param == "messages"
    failures.recall(b"another")
    now[0] += 1
    failures.recall(b"q")
    assert not failures._failed


def test_a_flood_of_failures_is_bounded_and_the_last_ones_are_kept() -> None:
    failures = RecentFailures(lambda: 0.0)
    for number in range(MAX_KEPT + 50):
        failures.note(str(number).encode() * 1000, InputError(str(number)))
    assert len(failures._failed) == MAX_KEPT
    failures.recall(b"0" * 1000)
    with pytest.raises(InputError):
        failures.recall(str(MAX_KEPT + 49).encode() * 1000)
