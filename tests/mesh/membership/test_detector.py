"""When to dial again."""

from __future__ import annotations

from exo_mesh.mesh.membership.detector import Backoff


def test_back_off_doubles_up_to_its_bound() -> None:
    backoff = Backoff(longest_s=4.0)
    assert backoff.may_try(0.0)
    pauses = []
    now = 0.0
    for _ in range(5):
        backoff.failed(now)
        pauses.append(backoff.not_before - now)
        now = backoff.not_before
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert backoff.may_try(now) and not backoff.may_try(now - 0.1)
