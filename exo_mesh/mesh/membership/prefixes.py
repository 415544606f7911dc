"""Spreads digests of what the drivers of each peer keep in their prefix caches (domain/routing/digest.py).

Like telemetry, they are not part of the agreed view. A message has them only while they are news, because they are
longer than everything else in a probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exo_mesh.domain.routing.digest import MAX_BYTES, is_digest, shortened
from exo_mesh.mesh.membership.gossip import GossipQueue, retransmissions
from exo_mesh.mesh.membership.roster import Roster
from exo_mesh.wire.proto import control_pb2 as pb

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


@dataclass(frozen=True, slots=True)
class _Published:
    """version: with the incarnation of the peer before it, because a peer counts from 1 again after a restart."""

    version: tuple[int, int] = (0, 0)
    digests: Mapping[str, bytes] = field(default_factory=dict)


class PrefixNews:
    """Holds the digests of all peers. read() returns the digests of this node's drivers, by instance.

    In a small mesh, where every peer probes every other, each peer sends its own digests to each other one. In a larger
    one they are gossiped.
    """

    def __init__(self, roster: Roster, read: Callable[[], Mapping[str, bytes]]) -> None:
        self._roster = roster
        self._read = read
        self._own = _Published()
        self._others: dict[str, _Published] = {}
        self._queue: GossipQueue[str] = GossipQueue()
        self._reached: dict[str, int] = {}
        """The peers of a small mesh that have what this node publishes now, with their incarnations."""
        self._read_at = self._told_at = -math.inf

    def of(self, peer_id: str) -> Mapping[str, bytes]:
        """The digests of a living peer's drivers, or of this node's, by instance."""
        if peer_id == self._roster.own.id:
            self._look()
            return self._own.digests
        return self._others.get(peer_id, _Published()).digests if peer_id in self._roster.peers else {}

    def take(self, peer_id: str) -> list[pb.PeerPrefixes]:
        """What one message to a peer has: in a small mesh this node's digests, unless the peer has been reached; else
        the least-sent news."""
        self._look()
        if not self._roster.is_small:
            return [self._message(one) for one in self._queue.take(MAX_NEWS) if self._knows(one)]
        peer = self._roster.peers.get(peer_id)
        if peer is None or self._reached.get(peer_id) == peer.info.incarnation or not self._own.version[1]:
            return []
        return [self._message(self._roster.own.id)]

    def reached(self, peer_id: str, messages: Sequence[pb.PeerPrefixes]) -> None:
        """Note that a peer has got these messages, the last ones that were taken for it."""
        peers = self._roster.peers
        if messages and messages[0].version == self._own.version[1] and self._roster.is_small and peer_id in peers:
            self._reached = {one: incarnation for one, incarnation in self._reached.items() if one in peers}
            self._reached[peer_id] = peers[peer_id].info.incarnation

    def hear(self, messages: Iterable[pb.PeerPrefixes]) -> None:
        """Store a peer's digests, and pass on the new ones. Digests of peers that are not alive are dropped, and so are
        digests of a wrong length."""
        for message in messages:
            peer = self._roster.peers.get(message.peer_id)
            if peer is None or peer.info.incarnation != message.incarnation:
                continue
            version = message.incarnation, message.version
            if version <= self._others.get(peer.id, _Published()).version:
                continue
            self._forget_lost()
            self._others[peer.id] = _Published(version, _checked(message.digests))
            if not self._roster.is_small:
                self._queue.put(peer.id, retransmissions(len(self._roster.peers)))

    def _look(self) -> None:
        now = self._roster.clock()
        if now < self._read_at + READ_S:
            return
        self._read_at = now
        digests = _bounded(self._read())
        if digests != self._own.digests:
            self._own = _Published((self._roster.own.incarnation, self._own.version[1] + 1), digests)
        elif not digests or now < self._told_at + REPEAT_S:
            return
        self._told_at = now
        self._reached.clear()
        if not self._roster.is_small:
            self._queue.put(self._roster.own.id, retransmissions(len(self._roster.peers)))

    def _knows(self, peer_id: str) -> bool:
        return peer_id == self._roster.own.id or (peer_id in self._others and peer_id in self._roster.peers)

    def _message(self, peer_id: str) -> pb.PeerPrefixes:
        held = self._own if peer_id == self._roster.own.id else self._others[peer_id]
        incarnation, version = held.version
        return pb.PeerPrefixes(peer_id=peer_id, incarnation=incarnation, version=version, digests=held.digests)

    def _forget_lost(self) -> None:
        for peer_id in self._others.keys() - self._roster.peers.keys():
            del self._others[peer_id]


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
