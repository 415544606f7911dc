"""Shares a prefill chunk between the sequences whose prompts are being computed. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from exo_mesh.domain.frame import Row
from exo_mesh.domain.images import whole_row
from exo_mesh.rings.runner.scheduling.sequence import Sequence, Work

LEAST_PIECE = 16
"""Fewest tokens with which a prompt begins or continues in a chunk that others fill: engines that compute row by row
read all weights for each row, which takes as long for 2 tokens as for 16. Of small chunks, a quarter."""


def deal_chunk(
    running: Mapping[int, Sequence], size: int, logit_rows: int, max_rows: int, *, catching_up: bool, ends: bool = False
) -> dict[int, int]:
    """Tokens of a chunk for each sequence, by id: half of the chunk for the oldest sequence, the rest for those
    with the least left. So a long prompt does not delay short ones, and they do not delay it. A sequence that must
    be in one row gets all or nothing, and the oldest one all, however long it is. ends: the last token of a prompt goes
    with the tokens before it, where it may."""
    wanted: dict[int, int] = {}
    for sequence in running.values():
        wants = sequence.catch_up_left if catching_up else sequence.chunk_left
        if ends and logit_rows and wants == sequence.prefill_left > 0 and sequence.ends_in_chunk:
            wants += 1
            logit_rows -= 1
        if wants and sequence.wants_scores and not sequence.embeds:
            wants = min(wants, logit_rows)
            logit_rows -= wants
        if wants:
            wanted[sequence.id] = wants
    first, *others = wanted
    is_whole = running[first].is_whole
    left = size - (wanted[first] if is_whole else min(wanted[first], size - size // 2))
    dealt: dict[int, int] = {}
    for sequence_id in sorted(others, key=lambda sequence_id: wanted[sequence_id])[: max_rows - 1]:
        share = min(max(0, left), wanted[sequence_id])
        is_all = share == wanted[sequence_id]
        if not is_all and (running[sequence_id].is_whole or share < min(LEAST_PIECE, size // 4)):
            continue
        dealt[sequence_id] = share
        left -= share
    dealt[first] = wanted[first] if is_whole else min(wanted[first], size - sum(dealt.values()))
    for sequence_id, n in dealt.items():
        sequence = running[sequence_id]
        if ends and n > 1 and wanted[sequence_id] - n == 1 and sequence.ends_in_chunk:
            dealt[sequence_id] = n = n - 1  # engines may compute a row that is alone by other kernels
        if n and sequence.pictures:
            dealt[sequence_id] = whole_row(sequence.pictures, sequence.computed, n)
    return dealt


def chunk_of(running: Mapping[int, Sequence], dealt: Mapping[int, int], turn: int, *, upto: int) -> Work:
    """Fills a chunk with the tokens dealt, and notes them as on their way. turn: number of the last decode frame.
    upto: see Work."""
    rows: list[Row] = []
    token_ids: list[int] = []
    drawing: list[Sequence] = []
    is_scoring = False
    for sequence in running.values():
        if not (n := dealt.get(sequence.id, 0)):
            continue
        if n > sequence.prefill_left and not upto:
            row = sequence.last_row()
            sequence.on_way += 1
            sequence.last_turn = turn
            drawing.append(sequence)
        else:
            row = sequence.prefill_row(n)
            is_scoring = is_scoring or row.num_logits > 0
        rows.append(row)
        token_ids += sequence.tokens[row.pos0 : row.pos0 + row.n]
        sequence.computed += row.n
    return Work(tuple(rows), tuple(token_ids), upto, is_scoring, is_prefill=True, drawing=tuple(drawing))
