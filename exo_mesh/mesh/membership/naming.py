"""Finds a peer by what people call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

from exo_mesh.base.printable import quoted
from exo_mesh.errors import InputError


class Named(Protocol):
    """The names in a peer's record."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=Named)

MIN_DIGITS = 4
"""Fewer leading digits of an id would match by chance what was meant as a name."""


ID_DIGITS = 6
"""Leading digits of an id that tell apart peers of one name."""


def told_apart(peers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns names by peer id; peers that share a name get the first digits of their ids added. peers: id, name."""
    known = dict(peers)
    shared = Counter(known.values())
    return {
        peer_id: name if shared[name] == 1 else f"{name} ({peer_id[:ID_DIGITS]})" for peer_id, name in known.items()
    }


def peer_called(name: str, peers: Iterable[P], param: str = "node_id") -> P | None:
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
