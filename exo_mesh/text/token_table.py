"""The texts of a large vocabulary, as far as a node needs them without the tokenizers library.

The library holds the interpreter while it reads a tokenizer, for 0.1 s for each megabyte. So a process reads a large
one and encodes with it; the node keeps the texts of its tokens, with which it decodes and looks tokens up.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TABLE_IDS = 1 << 20
"""Largest token id; the largest vocabularies have some 300,000 tokens."""

PART_TOKENS = 4096
"""Tokens that are sent at a time."""

MISSING = -1
"""Length of a token that does not exist."""


class AddedEntry(msgspec.Struct, frozen=True):
    """An added token, with the flags of the library's class of that name."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class TableHead(msgspec.Struct, frozen=True):
    """What a table has besides the texts. kind: of its model, such as BPE. decoder: as in tokenizer.json. num_tokens:
    how many tokens there are."""

    kind: str
    decoder: Any
    has_normalizer: bool
    num_tokens: int
    added: list[AddedEntry]


class TablePart(msgspec.Struct, frozen=True):
    """The tokens from one id on: the bytes of each in `lengths` (integers of four bytes in the order of the machine),
    and their texts one after the other."""

    lengths: bytes
    texts: str


def head_of(tokenizer: Tokenizer) -> TableHead:
    """Describe a tokenizer. It blocks."""
    import json

    decoder = tokenizer.decoder
    added = [
        AddedEntry(token_id, one.content, one.single_word, one.lstrip, one.rstrip, one.normalized, one.special)
        for token_id, one in tokenizer.get_added_tokens_decoder().items()
    ]
    return TableHead(
        type(tokenizer.model).__name__,
        None if decoder is None else json.loads(decoder.__getstate__()),
        tokenizer.normalizer is not None,
        tokenizer.get_vocab_size(),
        added,
    )


def parts_of(tokenizer: Tokenizer) -> Iterator[TablePart]:
    """The texts of all tokens. It blocks. Raises ValueError for an id above MAX_TABLE_IDS."""
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if last > MAX_TABLE_IDS:
        raise ValueError(f"it has a token with the id {last}; at most {MAX_TABLE_IDS} is supported")
    for start in range(0, last + 1, PART_TOKENS):
        found = [tokenizer.id_to_token(token_id) for token_id in range(start, min(last + 1, start + PART_TOKENS))]
        lengths = array("i", (MISSING if token is None else len(token.encode()) for token in found))
        yield TablePart(lengths.tobytes(), "".join(token for token in found if token is not None))


class TokenTable:
    """Has the methods of a Tokenizer that look tokens up and decode; it encodes nothing. Safe to use from several
    threads."""

    def __init__(self, head: TableHead, parts: Iterable[TablePart]) -> None:
        self._head = head
        self._added = {one.id: one for one in head.added}
        self._texts = bytearray()
        self._starts, self._is_missing = array("I", [0]), bytearray()
        for part in parts:
            lengths = array("i", part.lengths)
            self._starts.extend(accumulate((max(0, one) for one in lengths), initial=self._starts.pop()))
            self._is_missing.extend(one == MISSING for one in lengths)
            self._texts += part.texts.encode()
        self.decoder = _decoder_of(head.decoder)
        self.id_to_token = lru_cache(8192)(self._token_of)
        self.token_to_id = lru_cache(1024)(self._id_of)

    @property
    def kind(self) -> str:
        return self._head.kind

    @property
    def normalizer(self) -> bool | None:
        """None if there is none, as in a Tokenizer."""
        return self._head.has_normalizer or None

    def _token_of(self, token_id: int) -> str | None:
        if not 0 <= token_id < len(self._is_missing) or self._is_missing[token_id]:
            return None
        return self._texts[self._starts[token_id] : self._starts[token_id + 1]].decode()

    def get_vocab_size(self) -> int:
        return self._head.num_tokens

    def get_added_tokens_decoder(self) -> Mapping[int, AddedEntry]:
        return self._added

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """As Tokenizer.decode."""
        if skip_special_tokens:
            ids = [one for one in ids if one not in self._added or not self._added[one].special]
        tokens = [token for token in map(self.id_to_token, ids) if token is not None]
        return " ".join(tokens) if self.decoder is None else str(self.decoder.decode(tokens))

    def _id_of(self, token: str) -> int | None:
        """The first id with this text; added tokens come first, as in the library."""
        if (added := next((one.id for one in self._head.added if one.content == token), None)) is not None:
            return added
        wanted, at = token.encode(), -1
        while wanted and (at := self._texts.find(wanted, at + 1)) >= 0:
            token_id = bisect_left(self._starts, at)
            while token_id < len(self._is_missing) and self._starts[token_id] == at:
                if self.id_to_token(token_id) == token:
                    return token_id
                token_id += 1
        return None


def _decoder_of(decoder: Any) -> Any:
    """The library's decoder; None if there is none."""
    import json

    from tokenizers import Tokenizer

    if decoder is None:
        return None
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "decoder": decoder})).decoder
