"""Cuts the rows of a frame into forward passes of the library.

The library computes a batch in parts of its own, and gives results in the order of these parts. Their order is that of
the batch only if all sequences of a batch have equally many tokens and come in the order of their slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh_llamacpp.context import MAX_LOGITS, LlamaContext
from exo_mesh_llamacpp.shared.pool import Held


class RowPart(msgspec.Struct, frozen=True):
    """Some tokens of a row: n from position pos0 on, the first of them token `source` of the frame. order: of the
    pieces of one row."""

    row: Row
    context: LlamaContext
    slot: int
    pos0: int
    n: int
    source: int
    order: int


def pieces_of(rows: Sequence[tuple[Row, Held, int]], places: np.ndarray) -> list[RowPart]:
    """Rows in pieces that one pass can compute. places: see taken_places.

    All stages cut rows in the same way, although only the last one has logits: with other cuts, bits would differ.
    """
    found: list[RowPart] = []
    for row, held, source in rows:
        assert held.place is not None, "a row that is ready has a place"
        pool, slot = held.place
        if row.n == 1:  # a decode step, which must be quick
            found.append(RowPart(row, pool.context, slot, row.pos0, 1, source, 0))
            continue
        done = order = 0
        while done < row.n:
            n = min(row.n - done, pool.context.max_tokens)
            most = min(MAX_LOGITS, pool.context.max_tokens)  # tokens whose logits are wanted
            count = np.cumsum(places[source + done : source + done + n] >= 0)
            n = int(np.searchsorted(count, most, side="right"))
            found.append(RowPart(row, pool.context, slot, row.pos0 + done, n, source + done, order))
            done, order = done + n, order + 1
    return found


def together(rows: Sequence[tuple[Row, Held, int]]) -> Iterator[list[Held]]:
    """The sequences of each pass of two or more: sequences of one pool with equally many tokens."""
    groups: dict[tuple[int, int], list[Held]] = defaultdict(list)
    for row, held, _ in rows:
        assert held.place is not None, "a row that is ready has a place"
        groups[id(held.place[0]), row.n].append(held)
    return (group for group in groups.values() if len(group) > 1)


def passes(pieces: Sequence[RowPart]) -> Iterator[tuple[LlamaContext, list[RowPart]]]:
    """Pieces that are computed together: of one context and equal length, in the order of their slots."""
    groups: dict[tuple[int, int, int, bool], list[RowPart]] = defaultdict(list)
    for piece in pieces:
        groups[piece.order, id(piece.context), piece.n, piece.row.num_hidden > 0].append(piece)
    for (_, _, n, _), group in sorted(groups.items(), key=lambda item: item[0][0]):
        group.sort(key=lambda piece: piece.slot)
        at_once = max(1, min(MAX_LOGITS, group[0].context.max_tokens) // n)
        for begin in range(0, len(group), at_once):
            yield group[begin].context, group[begin : begin + at_once]


def logit_places(rows: Sequence[Row]) -> np.ndarray:
    """For each token of the frame: its row among the logits, or -1 if its logits are not wanted."""
    if all(row.n == row.num_logits == 1 for row in rows):  # decode steps, which must be quick
        return np.arange(len(rows))
    return _places([index >= row.n - row.num_logits for row in rows for index in range(row.n)])


def state_places(rows: Sequence[Row]) -> np.ndarray:
    """The same for the final hidden states."""
    return _places([index >= row.n - row.num_hidden for row in rows for index in range(row.n)])


def taken_places(rows: Sequence[Row]) -> np.ndarray:
    """The same for the tokens with outputs of the library: all tokens of a row that wants hidden states."""
    counts = [row.n if row.num_hidden else row.num_logits for row in rows]
    return _places([index >= row.n - count for row, count in zip(rows, counts, strict=True) for index in range(row.n)])


def _places(wanted: Sequence[bool]) -> np.ndarray:
    flags = np.array(wanted, bool)
    return np.where(flags, np.cumsum(flags) - 1, -1)
