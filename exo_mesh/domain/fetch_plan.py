"""Where each peer takes the missing bytes of a model from: from peers that have them first, and once from the hub.

Pure. What nobody has is fetched from the hub by one of the peers that want it, and the others take it from that one
while it arrives. Which one it is depends on the place of the bytes and on who wants them, and on nothing that peers may
see differently, such as what somebody has just now: so all come to the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from exo_mesh.domain.spans import Pieces, Span, Spans, common, merged, minus

HUB = ""
"""Stands for the hub where the id of a peer would be."""

BLOCK_BYTES = 32 * 2**20
"""Bytes that several peers want are dealt out to them in blocks of this size, so that all fetch at once."""


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """peer: HUB or a peer's id. is_arriving: the peer fetches these bytes itself, and passes them on as they come."""

    peer: str
    is_arriving: bool = False


@dataclass(frozen=True, slots=True)
class PlannedShare:
    """Bytes that have the same sources, the first choice first; no source: nobody has them and nobody can get them."""

    pieces: Pieces
    sources: tuple[PlannedSource, ...]


def fetch_plan(
    own_id: str,
    wants: Mapping[str, Pieces],
    present: Mapping[str, Pieces],
    ways: Sequence[str],
    hub_users: Collection[str],
) -> list[PlannedShare]:
    """The shares of one peer, which together are what it wants and does not have, in the order to fetch them.

    wants: what each peer that fetches now is to have. present: what each peer has. ways: the peers that `own_id` can
    read from, the best measured way first. hub_users: peers that may ask the hub, which is the last source of each.
    """
    own = present.get(own_id, {})
    cells: dict[tuple[PlannedSource, ...], dict[str, list[Span]]] = {}
    for file, wanted in sorted(wants.get(own_id, {}).items()):
        missing = minus(merged(wanted), merged(own.get(file, ())))
        held = {peer_id: merged(present.get(peer_id, {}).get(file, ())) for peer_id in ways if peer_id != own_id}
        sought = {peer_id: merged(pieces.get(file, ())) for peer_id, pieces in wants.items()}
        for cell in _cells(missing, [*held.values(), *sought.values()]):
            fetcher = _fetcher_of(cell, sought, hub_users)
            sources = [PlannedSource(peer_id) for peer_id in ways if common((cell,), held.get(peer_id, ()))]
            if fetcher not in (None, own_id) and fetcher in held and PlannedSource(fetcher) not in sources:
                sources.append(PlannedSource(fetcher, is_arriving=True))
            if own_id in hub_users:
                sources.append(PlannedSource(HUB))
            cells.setdefault(tuple(sources), {}).setdefault(file, []).append(cell)
    shares = [
        PlannedShare({file: merged(spans) for file, spans in files.items()}, sources)
        for sources, files in cells.items()
    ]
    return sorted(shares, key=_turn_of)


def _turn_of(share: PlannedShare) -> int:
    """First what this peer takes from the hub, for others wait for that; last what it waits for itself."""
    first = share.sources[0] if share.sources else PlannedSource(HUB)
    return 0 if first.peer == HUB else 2 if first.is_arriving else 1


def _cells(missing: Spans, others: Iterable[Spans]) -> list[Span]:
    """`missing`, cut wherever it begins or ends to be somebody's, and at the borders of blocks."""
    edges = sorted({edge for spans in others for span in spans for edge in span})
    cells: list[Span] = []
    for start, stop in missing:
        blocks = range(start - start % BLOCK_BYTES + BLOCK_BYTES, stop, BLOCK_BYTES)
        cuts = sorted({start, stop, *blocks, *(edge for edge in edges if start < edge < stop)})
        cells += pairwise(cuts)
    return cells


def _fetcher_of(cell: Span, sought: Mapping[str, Spans], hub_users: Collection[str]) -> str | None:
    """Who of those that want a cell fetches it from the hub; None if none of them may ask it."""
    able = sorted(peer_id for peer_id, spans in sought.items() if peer_id in hub_users and common((cell,), spans))
    return able[cell[0] // BLOCK_BYTES % len(able)] if able else None
