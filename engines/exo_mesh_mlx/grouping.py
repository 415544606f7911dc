"""Decides which rows of a frame are computed together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from exo_mesh.domain.frame import Row
from exo_mesh_mlx.packets import Group

MAX_GROUPED_TOKENS = 32
"""Longer rows are computed alone: their matrices are tall enough to use the machine, and together they take memory."""

MAX_GROUPED_ROWS = 64

MIN_POSITIONS = 8
"""A sequence with fewer positions is computed alone: its caches have no shape yet, or still grow into one (the last few
token ids, if embeddings are of several)."""


def waves(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Row indexes in order, cut before a repeated sequence: its second row needs the KV of the first one."""
    wave: list[int] = []
    seen: set[int] = set()
    for index, row in enumerate(rows):
        if row.sequence in seen:
            yield wave
            wave, seen = [], set()
        wave.append(index)
        seen.add(row.sequence)
    yield wave


def group_rows(rows: Sequence[Row], indexes: Sequence[int], left_out: Collection[int], batched: bool) -> list[Group]:
    """The rows at `indexes` in groups of equal n, or one by one. Rows of sequences in left_out are in no group. A row
    at or near the beginning of its sequence is alone."""
    same: dict[int, list[int]] = {}
    groups: list[Group] = []
    for index in indexes:
        row = rows[index]
        if row.sequence in left_out:
            continue
        if batched and row.pos0 >= MIN_POSITIONS and row.n <= MAX_GROUPED_TOKENS:
            same.setdefault(row.n, []).append(index)
        else:
            groups.append(Group((index,), row.n))
    for n, members in same.items():
        for begin in range(0, len(members), MAX_GROUPED_ROWS):
            groups.append(Group(tuple(members[begin : begin + MAX_GROUPED_ROWS]), n))
    return groups
