"""Finds the peer that a person means. The only rule for that: every verb, route and setting uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from exo_mesh.base.printable import quoted
from exo_mesh.errors import InputError, UnknownPeerError


class Named(Protocol):
    """The names in a peer's record."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=Named)

MIN_DIGITS = 4
"""Fewer leading digits of an id would match by chance what was meant as a name."""

MAX_LISTED = 20
"""Most peers that an error lists."""

ID_DIGITS = 6
"""Leading digits of an id that tell apart peers of one name."""


def told_apart(peers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns names by peer id; peers that share a name get the first digits of their ids added. peers: id, name."""
    known = dict(peers)
    shared = Counter(known.values())
    return {
        peer_id: name if shared[name] == 1 else f"{name} ({peer_id[:ID_DIGITS]})" for peer_id, name in known.items()
    }


def matching(text: str, peers: Iterable[P]) -> list[P]:
    """Returns the peers that `text` may mean: the peer with this id, else those with this name, else those whose id
    begins with it, if it has at least MIN_DIGITS characters."""
    known = list(peers)
    found = [peer for peer in known if peer.id == text] or [peer for peer in known if peer.name == text]
    if not found and len(text) >= MIN_DIGITS:
        found = [peer for peer in known if peer.id.startswith(text)]
    return found


def peer_named(text: str, peers: Iterable[P], param: str = "node_id") -> P:
    """Returns the peer with this id or name, or whose id begins with these digits; see `matching`.

    Raises UnknownPeerError if there is none, and InputError if there are several; both list the possible peers.
    """
    known = list(peers)
    found = matching(text, known)
    if len(found) > 1:
        ids = ", ".join(peer.id for peer in found[:MAX_LISTED])
        raise InputError(f"{len(found)} peers are called {quoted(text, 80)}: use an id ({ids})", param=param)
    if not found:
        known.sort(key=lambda peer: (peer.name, peer.id))
        listed = ", ".join(f"{quoted(peer.name, 80)} ({peer.id[:8]})" for peer in known[:MAX_LISTED])
        more = ", …" if len(known) > MAX_LISTED else ""
        raise UnknownPeerError(
            f"no peer is called {quoted(text, 80)}; known peers: {listed or 'none'}{more}", param=param
        )
    return found[0]


def peers_named(texts: Sequence[str], peers: Iterable[P], param: str = "peers") -> list[P]:
    """Returns the named peers, each once, in the order of their first names. Raises as peer_named."""
    known = list(peers)
    found = (peer_named(text, known, param) for text in texts)
    return list({peer.id: peer for peer in found}.values())
