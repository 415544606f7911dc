"""Spreads digests of what the drivers of each peer keep in their prefix caches (domain/routing/digest.py).

Like telemetry, they are not part of the agreed view. A message has them only while they are news, because they are
longer than everything else in a probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from exo_mesh.domain.routing.digest import MAX_BYTES, is_digest, shortened
from exo_mesh.mesh.membership.gossip import GossipQueue, retransmissions
from exo_mesh.mesh.membership.messages import PeerPrefixes
from exo_mesh.mesh.membership.roster import Roster

MAX_PEER_BYTES = 2 * MAX_BYTES
"""Most bytes of the digests of one peer. With more than two drivers each of them has a shorter one."""

MAX_INSTANCES = 32
"""Most instances of one peer whose digests are taken."""

MAX_NEWS = 2
"""Most peers in one message."""

READ_S, REPEAT_S = 0.9, 60.0
"""How often this node looks for changes of its own digests, and after which time it sends unchanged ones again, for
peers that have joined or missed them."""

MAX_ID = 64


class PrefixNews:
    """Holds the digests of all peers. read() returns the digests of this node's drivers, by instance.

    In a small mesh, where every peer probes every other, each peer sends its own digests to each other one. In a larger
    one they are gossiped.
    """

    def __init__(self, roster: Roster, read: Callable[[], Mapping[str, bytes]]) -> None:
        self._roster = roster
        self._read = read
        self._own = PeerPrefixes("", 0)
        self._others: dict[str, PeerPrefixes] = {}
        self._queue: GossipQueue[str] = GossipQueue()
        self._reached: dict[str, int] = {}
        """The peers of a small mesh that have what this node publishes now, with their incarnations."""
        self._read_at = self._told_at = -math.inf

    def of(self, peer_id: str) -> Mapping[str, bytes]:
        """The digests of a living peer's drivers, or of this node's, by instance."""
        if peer_id == self._roster.own.id:
            self._look()
        held = self._held(peer_id)
        return {} if held is None else held.digests

    def take(self, peer_id: str) -> tuple[PeerPrefixes, ...]:
        """What one message to a peer has: in a small mesh this node's digests, unless the peer has been reached; else
        the least-sent news."""
        self._look()
        if not self._roster.is_small:
            return tuple(held for one in self._queue.take(MAX_NEWS) if (held := self._held(one)) is not None)
        peer = self._roster.peers.get(peer_id)
        if peer is None or self._reached.get(peer_id) == peer.info.incarnation or not self._own.version:
            return ()
        return (self._own,)

    def reached(self, peer_id: str, messages: Sequence[PeerPrefixes]) -> None:
        """Note that a peer has got these messages, the last ones that were taken for it."""
        peers = self._roster.peers
        if messages and messages[0].version == self._own.version and self._roster.is_small and peer_id in peers:
            self._reached = {one: incarnation for one, incarnation in self._reached.items() if one in peers}
            self._reached[peer_id] = peers[peer_id].info.incarnation

    def hear(self, messages: Iterable[PeerPrefixes]) -> None:
        """Store a peer's digests, and pass on the new ones. Digests of peers that are not alive are dropped, and so are
        digests of a wrong length."""
        for message in messages:
            peer = self._roster.peers.get(message.peer_id)
            if peer is None or peer.info.incarnation != message.incarnation:
                continue
            held = self._others.get(peer.id)
            if held is not None and _age(message) <= _age(held):
                continue
            self._forget_lost()
            self._others[peer.id] = msgspec.structs.replace(message, digests=_checked(message.digests))
            if not self._roster.is_small:
                self._queue.put(peer.id, retransmissions(len(self._roster.peers)))

    def _look(self) -> None:
        now = self._roster.clock()
        if now < self._read_at + READ_S:
            return
        self._read_at = now
        digests = _bounded(self._read())
        if digests != self._own.digests:
            own = self._roster.own
            self._own = PeerPrefixes(own.id, own.incarnation, self._own.version + 1, digests)
        elif not digests or now < self._told_at + REPEAT_S:
            return
        self._told_at = now
        self._reached.clear()
        if not self._roster.is_small:
            self._queue.put(self._roster.own.id, retransmissions(len(self._roster.peers)))

    def _held(self, peer_id: str) -> PeerPrefixes | None:
        """What this node or a living peer publishes."""
        if peer_id == self._roster.own.id:
            return self._own
        return self._others.get(peer_id) if peer_id in self._roster.peers else None

    def _forget_lost(self) -> None:
        for peer_id in self._others.keys() - self._roster.peers.keys():
            del self._others[peer_id]


def _age(published: PeerPrefixes) -> tuple[int, int]:
    return published.incarnation, published.version


def _bounded(digests: Mapping[str, bytes]) -> dict[str, bytes]:
    """Digests that are together no longer than MAX_PEER_BYTES; each loses its least valuable entries for that."""
    known = [(name, digest) for name, digest in sorted(digests.items()) if is_digest(digest)][:MAX_INSTANCES]
    return {name: shortened(digest, MAX_PEER_BYTES // len(known)) for name, digest in known}


def _checked(digests: Mapping[str, bytes]) -> dict[str, bytes]:
    """The digests of another peer that are no longer than they may be."""
    taken: dict[str, bytes] = {}
    room = MAX_PEER_BYTES
    for name, digest in digests.items():
        if len(taken) < MAX_INSTANCES and len(name) <= MAX_ID and is_digest(digest) and len(digest) <= room:
            taken[name] = digest
            room -= len(digest)
    return taken
