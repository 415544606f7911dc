"""Finds the tokens that spell a given text, one token after the other. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt


class TokenBytes:
    """The bytes of every token of a vocabulary, sorted to find tokens by their beginning."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """tokens: by id; b"" for a token that is no text, such as a special token."""
        self.tokens = tokens
        self._ids = sorted((token_id for token_id, token in enumerate(tokens) if token), key=tokens.__getitem__)
        self._sorted = [tokens[token_id] for token_id in self._ids]
        self._longest = max(map(len, self._sorted), default=0)

    def along(self, text: bytes) -> Iterator[int]:
        """The ids of the tokens that `text` begins with, and of tokens that begin with `text`."""
        for size in range(1, min(len(text), self._longest + 1)):
            yield from self._starting(text[:size], exact=True)
        yield from self._starting(text, exact=False)

    def _starting(self, text: bytes, *, exact: bool) -> Iterator[int]:
        for at in range(bisect_left(self._sorted, text), len(self._sorted)):
            if self._sorted[at] != text if exact else not self._sorted[at].startswith(text):
                return
            yield self._ids[at]


class Spelling:
    """The text that the next tokens of an output must spell. The last of them may spell more."""

    def __init__(self, tokens: TokenBytes, text: str) -> None:
        self._tokens = tokens
        self._rest = text.encode()

    @property
    def is_done(self) -> bool:
        """Whether the tokens so far have spelled the text."""
        return not self._rest

    def allowed(self) -> npt.NDArray[np.bool_]:
        """By id, whether a token may come next."""
        allowed = np.zeros(len(self._tokens.tokens), np.bool_)
        allowed[list(self._tokens.along(self._rest))] = True
        return allowed

    def accept(self, token_id: int) -> None:
        """Record the next token, which is allowed."""
        self._rest = self._rest[len(self._tokens.tokens[token_id]) :]
