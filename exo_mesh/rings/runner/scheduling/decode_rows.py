"""Makes the rows of decode frames: the last known tokens of sequences, and drafts of the next ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import Protocol

from exo_mesh.domain.frame import LONGEST_DRAFT, Row
from exo_mesh.rings.runner.scheduling.sequence import Sequence, Work

MOST_DRAFTED = 64
"""Most drafts of all rows of a frame: the last stage makes logits of each of them, 0.6 MB with a vocabulary of 152,000
tokens."""


class Drafter(Protocol):
    """Says what to draft. cuts_at_rows: see Capabilities; of any stage."""

    cuts_at_rows: bool

    def propose(self, sequence: Sequence, num_decoding: int, most: int) -> Ordered[int]:
        """The tokens to send behind those that are known or on their way, at most `most`; none if that does not pay
        while so many sequences decode."""


def decode_rows(chosen: list[Sequence], drafts: Mapping[int, tuple[int, ...]], turn: int, *, at_rows: bool) -> Work:
    """The frame with the next row of each sequence, and its drafts by id. Notes them as on their way. turn: number of
    this decode frame. at_rows: KV can be cut back only to where a row began."""
    if len(chosen) > 1:  # an engine may want rows of one length side by side
        chosen.sort(key=lambda one: one.forced + len(drafts.get(one.id, ())))
    rows: list[Row] = []
    token_ids: list[int] = []
    for sequence in chosen:
        n = 1 + sequence.forced
        draft = drafts.get(sequence.id, ())
        row = Row(sequence.id, len(sequence.tokens) - n, n + len(draft), num_logits=1 + len(draft))
        rows.append(row)
        token_ids += sequence.tokens[-n:]
        token_ids += draft
        _sent(sequence, row, draft, turn, at_rows=at_rows)
    return Work(tuple(rows), tuple(token_ids), drawing=tuple(chosen))


def row_ahead(sequence: Sequence, draft: tuple[int, ...], turn: int, *, at_rows: bool) -> Work:
    """The frame with drafts behind the rows of a sequence that are on their way. turn, at_rows: see `decode_rows`."""
    row = Row(sequence.id, sequence.computed, len(draft), num_logits=len(draft), drafted=True)
    _sent(sequence, row, draft, turn, at_rows=at_rows)
    return Work((row,), draft, drawing=(sequence,), goes_ahead=True)


def _sent(sequence: Sequence, row: Row, draft: Ordered[int], turn: int, *, at_rows: bool) -> None:
    """Note a row on its way, with all known tokens that were left and these drafts."""
    if at_rows and draft:
        sequence.starts.append(row.pos0)
        del sequence.starts[:-LONGEST_DRAFT]
    sequence.on_way += 1
    sequence.ahead += draft
    sequence.computed = len(sequence.tokens) + len(sequence.ahead)
    sequence.last_turn = turn
    sequence.forced = 0
