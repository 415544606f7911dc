"""Streaming detokenization equals the one-shot decode, for three families of tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from exo_mesh.text.detokenizer import MAX_WINDOW_TOKENS, REPLACEMENT, Detokenizer
from tests.text.text_models import byte_fallback, byte_level, word_piece

TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback(), "word-piece": word_piece()}
TEXTS = st.text(
    st.one_of(st.sampled_from(" aeHlow, \n▁é€日🙂👩\u200d"), st.characters(exclude_categories=["Cs"])), max_size=40
)

HIDDEN = (REPLACEMENT, *(token.content for token in TOKENIZERS["byte-level"].get_added_tokens_decoder().values()))
"""A text that has one of these does not come back as it was: hypothesis tries the strings of our source, too."""


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    added = tokenizer.get_added_tokens_decoder()
    detokenizer = Detokenizer(tokenizer, frozenset(i for i, token in added.items() if token.special))
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("family", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_streamed_text_equals_the_one_shot_decode(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    ids = tokenizer.encode(text).ids
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS.filter(lambda text: not any(word in text for word in HIDDEN)))
def test_an_incomplete_character_is_never_shown(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    pieces = pieces_of(tokenizer, tokenizer.encode(text).ids)
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_ids_of_a_byte_level_vocabulary_give_the_one_shot_decode(data: st.DataObject) -> None:
    """Also bytes that are no text, special tokens between the bytes of a character, and ids without a token."""
    tokenizer = TOKENIZERS["byte-level"]
    size = tokenizer.get_vocab_size()
    broken = [tokenizer.token_to_id(c) for c in "âĤ¬Ġð"]  # the bytes e2 82 ac 20 f0
    ids = data.draw(st.lists(st.one_of(st.sampled_from(broken), st.integers(0, size + 9)), max_size=60))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.token_to_id(c) for c in "aâĤ¬b"]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "€", "b", ""]


def test_a_leading_space_is_stripped_once_and_kept_everywhere_else() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = tokenizer.encode("wor wor").ids
    hidden = tokenizer.token_to_id("<s>")
    assert "".join(pieces_of(tokenizer, [hidden, *ids[:1], hidden, *ids[1:]])) == "wor wor"


@pytest.mark.parametrize("family", ["byte-level", "byte-fallback"])
def test_broken_bytes_without_end_neither_stall_nor_grow(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    broken = tokenizer.token_to_id("Ģ" if family == "byte-level" else "<0x80>")
    longest = 0

    class Watched:
        """The tokenizer, watched for how much it is asked to decode."""

        id_to_token = tokenizer.id_to_token

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Watched(), frozenset())  # type: ignore[arg-type]
    pieces = [detokenizer.push(broken) for _ in range(500)] + [detokenizer.flush()]
    assert "".join(pieces) == REPLACEMENT * 500
    assert longest <= 2 * MAX_WINDOW_TOKENS + 2


def test_tokens_without_text_are_forgotten() -> None:
    class Silent:
        """A decoder that never says anything."""

        def id_to_token(self, token_id: int) -> str:
            return "x"

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert len(ids) <= MAX_WINDOW_TOKENS + 1
            return ""

    detokenizer = Detokenizer(Silent(), frozenset())  # type: ignore[arg-type]
    assert {detokenizer.push(i) for i in range(300)} == {""}
