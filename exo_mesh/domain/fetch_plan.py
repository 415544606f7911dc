"""Plans where each peer gets the missing bytes of a model: from peers that have them first, and once from the hub.

Pure. Bytes that no peer has are fetched from the hub by one of the peers that want them; the others read them from that
peer while they arrive. The choice of that peer depends only on the position of the bytes and on which peers want them,
never on what peers may see differently (such as the bytes that a peer has at the moment), so all peers choose alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from exo_mesh.domain.spans import Pieces, Span, Spans, common, merged, minus

HUB = ""
"""Stands for the hub in place of a peer's id."""

BLOCK_BYTES = 32 * 2**20
"""Bytes that several peers want are divided among them in blocks of this size, so that all fetch at once."""


class PlannedSource(msgspec.Struct, frozen=True):
    """A source of bytes. peer: HUB or a peer's id. is_arriving: the peer is still fetching the bytes and passes them
    on."""

    peer: str
    is_arriving: bool = False


class PlannedShare(msgspec.Struct, frozen=True):
    """Bytes with the same sources, the first choice first. No source: no peer has the bytes or can get them."""

    pieces: Pieces
    sources: tuple[PlannedSource, ...]


def fetch_plan(
    own_id: str,
    wants: Mapping[str, Pieces],
    present: Mapping[str, Pieces],
    ways: Sequence[str],
    hub_users: Collection[str],
) -> list[PlannedShare]:
    """Computes the shares of one peer, in the order to fetch them: together all that it wants and does not have.

    wants: the bytes that each fetching peer must end up with. present: the bytes that each peer has. ways: the peers
    that `own_id` can read from, the best measured path first. hub_users: peers that may use the hub, which is the last
    source of each share.
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
    """Sort key: first what this peer gets from the hub, because others wait for it; last what this peer waits for."""
    first = share.sources[0] if share.sources else PlannedSource(HUB)
    return 0 if first.peer == HUB else 2 if first.is_arriving else 1


def _cells(missing: Spans, others: Iterable[Spans]) -> list[Span]:
    """Cuts `missing` at the ends of every span that a peer holds or wants, and at the borders of blocks."""
    edges = sorted({edge for spans in others for span in spans for edge in span})
    cells: list[Span] = []
    for start, stop in missing:
        blocks = range(start - start % BLOCK_BYTES + BLOCK_BYTES, stop, BLOCK_BYTES)
        cuts = sorted({start, stop, *blocks, *(edge for edge in edges if start < edge < stop)})
        cells += pairwise(cuts)
    return cells


def _fetcher_of(cell: Span, sought: Mapping[str, Spans], hub_users: Collection[str]) -> str | None:
    """Returns the peer that fetches a cell from the hub, among the peers that want it; None if none may use the hub."""
    able = sorted(peer_id for peer_id, spans in sought.items() if peer_id in hub_users and common((cell,), spans))
    return able[cell[0] // BLOCK_BYTES % len(able)] if able else None
