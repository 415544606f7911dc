"""Who was refused is told for a while, and no more once it has joined."""

from __future__ import annotations

from exo_mesh.mesh.membership.refusals import MAX_REFUSALS, REFUSED_S, Refusals


def test_a_refusal_is_told_until_a_while_after_the_last_attempt() -> None:
    refusals = Refusals()
    assert refusals.note("box", "another namespace", 0.0)
    assert not refusals.note("box", "another namespace", 10.0), "no news"
    assert refusals.texts(REFUSED_S + 9.9) == ["box: another namespace"]
    assert refusals.texts(REFUSED_S + 10.0) == []
    assert refusals.note("box", "another namespace", 200.0), "news again"


def test_a_peer_that_joins_is_refused_no_more_and_others_still_are() -> None:
    refusals = Refusals()
    refusals.note("box at 10.0.0.1", "another namespace", 0.0, peer_id="b")
    refusals.note("10.0.0.1:5000", "another secret", 0.0, address="10.0.0.1:5000")
    refusals.note("den at 10.0.0.1", "another version", 0.0, peer_id="d")
    refusals.note("10.0.0.1:5001", "another secret", 0.0, address="10.0.0.1:5001")
    refusals.joined("b", ["10.0.0.1:5000"])
    assert refusals.texts(1.0) == ["den at 10.0.0.1: another version", "10.0.0.1:5001: another secret"]


def test_one_text_is_told_once_whoever_it_came_from() -> None:
    refusals = Refusals()
    assert refusals.note("box", "full", 0.0, peer_id="b")
    assert not refusals.note("box", "full", 0.0, peer_id="c")
    assert refusals.texts(0.0) == ["box: full"]


def test_a_flood_pushes_out_the_oldest() -> None:
    refusals = Refusals()
    for number in range(1000):
        refusals.note(f"n{number}", "no", 0.0)
    assert refusals.texts(0.0) == [f"n{number}: no" for number in range(1000 - MAX_REFUSALS, 1000)]


def test_a_peer_that_is_refused_will_not_come_back() -> None:
    refusals = Refusals()
    refusals.note("vm at 10.0.0.1", "another namespace", 0.0, peer_id="v")
    refusals.note("10.0.0.2:5000", "another secret", 0.0, address="10.0.0.2:5000")
    assert refusals.holds("v", [], 1.0) and refusals.holds("w", ["10.0.0.2:5000"], 1.0)
    assert not refusals.holds("w", ["10.0.0.3:5000"], 1.0)
    assert not refusals.holds("v", [], REFUSED_S + 1.0), "it is no longer tried"
