"""Exactly those tokens are allowed that spell the text which must come next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.text.spelling import Spelling, TokenBytes

tokens = st.lists(st.text("ab ü", max_size=4).map(str.encode), max_size=30)


@given(tokens, st.text("ab ü", min_size=1, max_size=8))
def test_a_token_may_come_if_it_is_a_part_of_the_text_or_goes_beyond_it(found: list[bytes], text: str) -> None:
    spelled = text.encode()
    expected = [bool(token) and (token.startswith(spelled) or spelled.startswith(token)) for token in found]
    assert list(Spelling(TokenBytes(found), text).allowed()) == expected


def test_a_text_is_spelled_to_its_end_and_not_further() -> None:
    vocabulary = TokenBytes([b",", b", ", b" ", b"1", b"", b"\xc3", b"\xbc", b"\xbc1"])
    spelling = Spelling(vocabulary, ", ü")
    for token_id, others in ((1, {0}), (5, set()), (7, {6})):
        assert not spelling.is_done
        assert {int(one) for one in spelling.allowed().nonzero()[0]} == {token_id, *others}
        spelling.accept(token_id)
    assert spelling.is_done
