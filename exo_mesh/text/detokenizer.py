"""Turns token ids into text, one token at a time, at a constant cost per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from exo_mesh.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from exo_mesh.text.token_table import TokenTable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes
MAX_WINDOW_TOKENS = 32  # after this many tokens without valid text, the bytes are sent as they decode


class Detokenizer:
    """Decodes one output token by token.

    The pieces that `push` and `flush` return, joined, equal the decode of all ids at once. Both raise ModelError.
    A decoder may look at neighbouring tokens (a space before a word, a character of several bytes). So the last piece
    that was sent is decoded again together with the new tokens, and only the difference is sent. An incomplete
    character decodes to U+FFFD at the end: it is held until it is complete or can no longer become complete.
    """

    def __init__(self, tokenizer: Tokenizer | TokenTable, hidden_ids: frozenset[int]) -> None:
        """hidden_ids: tokens that are never text (special tokens); they are skipped wherever they appear."""
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._window: list[int] = []
        self._num_sent = 0  # tokens of the window whose text was sent
        self._sent = ""  # their text, as it decodes from the start of the window

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that it completes; "" if the token ends inside a character."""
        if token_id in self._hidden_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) > len(self._sent) and not text.endswith(REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._num_sent > MAX_WINDOW_TOKENS:  # the bytes will never become text
            return self._advance(len(self._window), text)
        if len(self._window) - self._num_sent > MAX_CHARACTER_TOKENS:
            return self._release_broken(text)
        return ""

    def continue_after(self, token_ids: Sequence[int]) -> None:
        """Start again after these tokens, whose text has been sent."""
        self._window, self._num_sent, self._sent = [], 0, ""
        for token_id in token_ids[-MAX_WINDOW_TOKENS:]:
            self.push(token_id)
        self.flush()

    def flush(self) -> str:
        """End the stream. Returns the text of an incomplete character, if one is held, else ""."""
        text = self._decode(self._window)
        return self._advance(len(self._window), text)

    def _release_broken(self, text: str) -> str:
        """Send the held tokens except the tokens of the last character, which may still become complete.

        More tokens are held than one character needs, so some of their bytes can never become a character. The window
        may be cut at a border if both sides, decoded separately, give the same text as when decoded together.
        """
        for border in range(len(self._window) - MAX_CHARACTER_TOKENS + 1, len(self._window)):
            head = self._decode(self._window[:border])
            if len(head) > len(self._sent) and head + self._decode(self._window[border:]) == text:
                return self._advance(border, head)
        return ""

    def _advance(self, border: int, text: str) -> str:
        """Return the text that is new in the window up to `border`, and mark it as sent. text: the decode of the window
        up to `border`."""
        piece = text[len(self._sent) :]
        fresh = self._window[self._num_sent : border]
        if not piece:
            del self._window[self._num_sent : border]  # tokens without text need not be decoded again
        elif fresh:
            self._window = self._window[self._num_sent :]
            self._num_sent = len(fresh)
            self._sent = self._decode(fresh)
        return piece

    def _decode(self, ids: list[int]) -> str:
        try:
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        except BaseException as exc:
            if not is_panic(exc):
                raise
            raise ModelError("the model's tokenizer cannot decode the tokens that the model generated") from exc


class CleaningDetokenizer(Detokenizer):
    """Leaves out the spaces before punctuation and English endings, for tokenizers that cut texts into words. Holds
    back the last word until it is certain where its space stays."""

    def __init__(self, tokenizer: Tokenizer | TokenTable, hidden_ids: frozenset[int]) -> None:
        super().__init__(tokenizer, hidden_ids)
        self._held = ""

    def push(self, token_id: int) -> str:
        text = self._held + super().push(token_id)
        border = _certain(text)
        self._held = text[border:]
        return _clean(text[:border])

    def flush(self) -> str:
        text, self._held = self._held + super().flush(), ""
        return _clean(text)


_LEFT_OUT = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Texts without some of their spaces, in the order of transformers: " n ' t" becomes " n't", and that "n't"."""

_LONGEST = len(" n ' t")
_MOST_HELD = 64


def _certain(text: str) -> int:
    """The length of the beginning that no further text changes."""
    if " " not in text[-_LONGEST:] or len(text) > _MOST_HELD:
        return len(text)
    spaces = (at for at in range(len(text) - 2, 0, -1) if text[at] == " ")
    return next((at for at in spaces if text[at + 1] != "'" and text[at - 1] != "'"), 0)


def _clean(text: str) -> str:
    for one in _LEFT_OUT:
        text = text.replace(one, one.strip())
    return text


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked, as a hostile tokenizer.json or grammar can make it. Its exception derives from
    BaseException only, so `except Exception` does not catch it, and its class cannot be imported."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"
