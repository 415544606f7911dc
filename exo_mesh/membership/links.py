"""The links between peers: this node's, which travel with its telemetry, and those that other peers told of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from exo_mesh.domain.device import LinkReading, Telemetry
from exo_mesh.membership.peers import Peer
from exo_mesh.transport.control_codec import MAX_LINKS


def own_links(peers: Iterable[Peer]) -> dict[str, LinkReading]:
    """How this node reaches each peer; nothing in a mesh of more than MAX_LINKS others.

    A reading travels with every probe, and the links of a large mesh would be most of it.
    """
    peers = list(peers)
    return {peer.id: link_of(peer) for peer in peers} if len(peers) <= MAX_LINKS else {}


def link_of(peer: Peer) -> LinkReading:
    """The way in use to a peer. rtt_ms: as measured on that address, or that of the last exchanges until it is."""
    used = peer.paths.get(peer.client.address)
    rtt_ms = used.rtt_ms if used is not None and used.works else peer.rtt_ms
    kind, mb_per_s = ("", None) if used is None else (used.kind.name.lower(), used.mb_per_s)
    return LinkReading(kind, _rounded(rtt_ms), _rounded(mb_per_s))


def links_of_others(own_id: str, readings: Mapping[str, Telemetry]) -> list[tuple[str, str, LinkReading]]:
    """(from, to, figures) of each pair of other live peers once, as the first by id that tells of it says."""
    found: dict[tuple[str, str], tuple[str, str, LinkReading]] = {}
    for teller in sorted(readings):
        for other, link in readings[teller].links.items():
            if own_id not in (teller, other) and other in readings and teller != other:
                found.setdefault((min(teller, other), max(teller, other)), (teller, other, link))
    return [found[pair] for pair in sorted(found)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
