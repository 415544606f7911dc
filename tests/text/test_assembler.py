"""From token events to pieces: text and tokens that tell the same story."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.domain.request import FinishReason, TokenEvent
from exo_mesh.text.assembler import Piece, TextAssembler
from exo_mesh.text.detokenizer import Detokenizer
from tests.text.text_models import byte_level

TOKENIZER = byte_level()


def assembled(text: str, stops: tuple[str, ...] = (), finish: FinishReason = FinishReason.LENGTH) -> list[Piece]:
    ids = TOKENIZER.encode(text).ids
    assembler = TextAssembler(Detokenizer(TOKENIZER, frozenset()), stops)
    pieces: list[Piece] = []
    for index, token_id in enumerate(ids):
        pieces.append(assembler.push(TokenEvent(index, token_id)))
        if pieces[-1].finish:
            return pieces
    return [*pieces, assembler.push(TokenEvent(len(ids), None, finish=finish))]


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [span.event.index for piece in pieces for span in piece.tokens]


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab €🙂", max_size=20), stop=st.text("ab €🙂", min_size=1, max_size=3))
def test_tokens_cover_the_text_and_nothing_of_the_stop_string(text: str, stop: str) -> None:
    pieces = assembled(text, (stop,))
    sent = "".join(piece.text for piece in pieces)
    assert sent == text.split(stop)[0]
    indexes = tokens_of(pieces)
    assert indexes == list(range(len(indexes)))
    spans = [span for piece in pieces for span in piece.tokens]
    assert all(span.stop <= len(sent) for span in spans)
    if stop in text:
        assert pieces[-1].finish is FinishReason.STOP
    else:
        assert (pieces[-1].finish, len(indexes)) == (FinishReason.LENGTH, len(TOKENIZER.encode(text).ids))


def test_a_token_is_released_with_its_text() -> None:
    pieces = assembled("a€b")
    assert [piece.text for piece in pieces if piece.text] == ["a", "€", "b"]
    for piece in pieces:
        assert "".join(str(span.start) for span in piece.tokens) in ("", "0", "1" * len(piece.tokens), "2")


def test_a_token_may_come_together_with_the_end() -> None:
    assembler = TextAssembler(Detokenizer(TOKENIZER, frozenset()), ("zz",))
    token_id = TOKENIZER.encode("z").ids[0]
    piece = assembler.push(TokenEvent(0, token_id, finish=FinishReason.LENGTH))
    assert (piece.text, piece.finish, len(piece.tokens)) == ("z", FinishReason.LENGTH, 1)


def test_an_end_inside_a_character_shows_that_it_is_broken() -> None:
    assembler = TextAssembler(Detokenizer(TOKENIZER, frozenset()))
    assert assembler.push(TokenEvent(0, TOKENIZER.token_to_id("â"))).text == ""
    assert assembler.push(TokenEvent(1, None, finish=FinishReason.STOP)).text == "\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_may_complete_at_the_very_end() -> None:
    """A broken character is flushed last, and can be a stop string itself."""
    assembler = TextAssembler(Detokenizer(TOKENIZER, frozenset()), ("\N{REPLACEMENT CHARACTER}",))
    assembler.push(TokenEvent(0, TOKENIZER.token_to_id("â")))
    piece = assembler.push(TokenEvent(1, None, finish=FinishReason.LENGTH))
    assert (piece.text, piece.tokens, piece.finish) == ("", (), FinishReason.STOP)


@settings(max_examples=50, deadline=None)
@given(text=st.text("ab €", max_size=12), least=st.integers(0, 12))
def test_stop_strings_are_looked_for_after_the_least_number_of_tokens(text: str, least: int) -> None:
    ids = TOKENIZER.encode(text).ids
    assembler = TextAssembler(Detokenizer(TOKENIZER, frozenset()), ("a",), least)
    pieces = [assembler.push(TokenEvent(index, token_id)) for index, token_id in enumerate(ids)]
    ends = [index for index, piece in enumerate(pieces) if piece.finish is not None]
    wanted = [index for index, token_id in enumerate(ids) if "a" in TOKENIZER.decode([token_id]) and index >= least]
    assert ends[:1] == wanted[:1]
    if not ends:
        pieces.append(assembler.push(TokenEvent(len(ids), None, finish=FinishReason.LENGTH)))
        assert ("".join(piece.text for piece in pieces), pieces[-1].finish) == (text, FinishReason.LENGTH)
