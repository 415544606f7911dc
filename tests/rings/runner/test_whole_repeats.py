"""An engine that cannot continue an answer gives it again: what the client has is dropped, if it is the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.whole.repeating import Repeated
from exo_mesh.domain.whole.text_pieces import TextPiece, text_of
from exo_mesh.errors import EngineError


def cut(text: str, places: list[int]) -> list[TextPiece]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [TextPiece("text", text[start:stop]) for start, stop in pairwise(edges)]


@given(st.text(max_size=40), st.text(max_size=40), st.lists(st.integers(0, 80)), st.lists(st.integers(0, 80)))
def test_only_what_is_new_is_left_however_both_were_cut(
    begun: str, rest: str, cuts: list[int], again: list[int]
) -> None:
    repeated = Repeated(cut(begun, cuts))
    left = [repeated.take(piece) for piece in cut(begun + rest, again)]
    assert text_of(piece for piece in left if piece is not None) == rest
    assert repeated.is_over


def test_another_answer_is_an_error_with_the_number_of_characters_that_were_sent() -> None:
    repeated = Repeated([TextPiece("text", "It is "), TextPiece("text", "blue")])
    assert repeated.take(TextPiece("text", "It is b")) is None
    with pytest.raises(EngineError, match="the 10 characters that were sent"):
        repeated.take(TextPiece("text", "rown"))


def test_reasoning_is_not_taken_for_text() -> None:
    with pytest.raises(EngineError, match="did not repeat"):
        Repeated([TextPiece("reasoning", "hm")]).take(TextPiece("text", "hm"))


def test_a_call_continues_after_the_part_of_its_arguments_that_was_sent() -> None:
    repeated = Repeated([TextPiece("call", "", 0, "id1", "look"), TextPiece("call", '{"a', 0)])
    assert repeated.take(TextPiece("call", "", 0, "other", "look")) is None
    rest = repeated.take(TextPiece("call", '{"a": 1}', 0))
    assert rest == TextPiece("call", '": 1}', 0)


def test_an_answer_that_ends_before_the_part_that_was_sent_is_another_one() -> None:
    repeated = Repeated([TextPiece("text", "long answer")])
    repeated.take(TextPiece("text", "long"))
    assert not repeated.is_over
