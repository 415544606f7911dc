"""Who is dead, and when to dial again."""

from __future__ import annotations

from exo_mesh.membership.detector import DEAD_AFTER_S, Backoff, Liveness


def test_a_peer_is_dead_when_it_was_silent_and_asked_in_vain() -> None:
    peer = Liveness(last_heard=100.0)
    peer.probe_failed()
    peer.probe_failed()
    assert not peer.is_dead(100.0 + DEAD_AFTER_S)
    assert peer.is_dead(100.1 + DEAD_AFTER_S)


def test_a_node_that_stood_still_itself_asks_before_it_judges() -> None:
    peer = Liveness(last_heard=100.0)
    assert not peer.is_dead(500.0)
    peer.probe_failed()
    assert not peer.is_dead(500.0)


def test_any_sign_of_life_counts() -> None:
    peer = Liveness(last_heard=100.0)
    for _ in range(5):
        peer.probe_failed()
    peer.heard(104.0)
    peer.probe_failed()
    peer.probe_failed()
    assert not peer.is_dead(106.0)


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
