"""Splits a text into tokens that stand whatever follows it, and a rest that the next tokens have to spell."""

from __future__ import annotations

from itertools import accumulate

from msgspec.structs import replace

from exo_mesh.domain.whole.text_pieces import Respelling
from exo_mesh.text.detokenizer import Detokenizer
from exo_mesh.text.token_table import TokenTable
from exo_mesh.text.tokenizer import TextModel

MAX_TAKEN_BACK = 8
"""Most tokens at the end of a text that are spelled again. What follows a text changes the tokens of its last word, and
seldom of the word before it. Each of these tokens takes a step of the ring, once."""


MAX_GROWN_LENGTH = 1 << 22
"""Most characters after the normalizer of an answer that is encoded in this process, whatever its length."""


def respell(text: TextModel, written: str) -> Respelling:
    """The tokens of an answer that may continue in any way. Added tokens, such as markers, are never spelled again, and
    a text that the tokenizer changes is not either. It blocks. Raises InputError."""
    bounds = text.bounds
    is_here = not isinstance(text.tokenizer, TokenTable)
    if is_here and bounds is not None and bounds.is_listed and len(written) * bounds.growth <= MAX_GROWN_LENGTH:
        text = replace(text, elsewhere=None)  # the caller is on an event loop
    ids = tuple(text.encode_prompt(written))
    pieces = _pieces(text, ids)
    if "".join(pieces) != written:
        return Respelling(ids)
    first = max(0, len(ids) - MAX_TAKEN_BACK)
    added = set(text.added_tokens.values())
    for index in range(len(ids) - 1, first - 1, -1):
        if ids[index] in added:
            first = index + 1
            break
    lengths = [0, *accumulate(map(len, pieces[:-1]))]
    keep = next((n for n in range(first, len(ids)) if not n or pieces[n - 1]), len(ids))
    known = written[lengths[keep] :]
    spelling = _spelled(text, ids[keep:])
    return Respelling(ids[:keep], spelling, known) if spelling in (known, " " + known) else Respelling(ids)


def _pieces(text: TextModel, ids: tuple[int, ...]) -> list[str]:
    """The text that each token completes, "" if it ends inside a character; at last what was never completed."""
    detokenizer = Detokenizer(text.tokenizer, frozenset())
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def _spelled(text: TextModel, ids: tuple[int, ...]) -> str:
    return b"".join(map(text.token_bytes, ids)).decode(errors="replace")
