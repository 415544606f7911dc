"""Finds a peer by what people call it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import InputError
from exo_mesh.printable import quoted

MIN_DIGITS = 4
"""Fewer leading digits of an id would match by chance what was meant as a name."""


def peer_called(name: str, peers: Iterable[PeerInfo], param: str = "node_id") -> PeerInfo | None:
    """Returns the peer with this id, else with this name, else whose id begins with these digits; None if there is
    none. Raises InputError if several peers match."""
    known = list(peers)
    found = [peer for peer in known if peer.id == name] or [peer for peer in known if peer.name == name]
    if not found and len(name) >= MIN_DIGITS:
        found = [peer for peer in known if peer.id.startswith(name)]
    if len(found) > 1:
        ids = ", ".join(peer.id for peer in found)
        raise InputError(f"{len(found)} peers are called {quoted(name, 80)}: use an id ({ids})", param=param)
    return found[0] if found else None
