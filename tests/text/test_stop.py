"""Stop strings: where a stream is cut, whatever its pieces are."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exo_mesh.text.stop import StopStrings

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stopper = StopStrings(stops)
    text = "".join(stopper.push(piece) for piece in pieces)
    return text + stopper.flush(), stopper.stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "sent"),
    [
        (["END"], ["one E", "N", "D two"], ["one ", "", ""]),
        (["END"], ["one E", "N", "X"], ["one ", "", "ENX"]),
        (["aab"], ["aa", "a", "b"], ["", "a", ""]),
        (["abcd", "c"], ["ab", "c"], ["", "ab"]),
        (["bcd", "abcde"], ["abcd", "e"], ["a", ""]),
        (["bc", "abc"], ["xabc"], ["x"]),
        (["x"], ["abx", "more"], ["ab", ""]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_what_is_sent_when(stops: list[str], pieces: list[str], sent: list[str]) -> None:
    stopper = StopStrings(stops)
    assert [stopper.push(piece) for piece in pieces] == sent


@pytest.mark.parametrize(
    ("stops", "pieces", "matched"),
    [(["x", "END"], ["an E", "ND"], "END"), (["bc", "abc"], ["xabc"], "abc"), (["END"], ["EN"], "")],
)
def test_the_stop_string_that_was_found_is_named(stops: list[str], pieces: list[str], matched: str) -> None:
    stopper = StopStrings(stops)
    for piece in pieces:
        stopper.push(piece)
    assert stopper.matched == matched


def test_what_was_held_comes_at_the_end() -> None:
    assert run(["END"], ["the EN"]) == ("the EN", False)


def test_an_empty_stop_string_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])


@settings(max_examples=100, deadline=None)
@given(stops=STOPS, text=TEXTS, data=st.data())
@example(["ab"], "aab", None)
def test_the_cut_does_not_depend_on_the_pieces(stops: list[str], text: str, data: st.DataObject | None) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))) if data else []
    pieces = [text[start:stop] for start, stop in zip([0, *borders], [*borders, len(text)], strict=True)]
    expected = run(stops, list(text))
    assert run(stops, pieces) == expected
    sent, stopped = expected
    assert text.startswith(sent)
    assert not any(stop in sent for stop in stops)
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert sent == text


@settings(max_examples=80, deadline=None)
@given(stops=STOPS, text=TEXTS)
def test_no_more_is_held_than_could_begin_a_stop_string(stops: list[str], text: str) -> None:
    stopper = StopStrings(stops)
    sent = "".join(stopper.push(character) for character in text)
    if not stopper.stopped:
        held = text[len(sent) :]
        assert not held or any(stop.startswith(held) for stop in stops)
