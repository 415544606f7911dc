"""Holds the admitted peers and the facts about them: the state that admission, probing and exchange share."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from enum import Enum

from exo_mesh.base.clock import Clock
from exo_mesh.base.tasks import ChangeSignal, TaskOwner
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.view import Record, RecordKey, View
from exo_mesh.mesh.membership.detector import Timing
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.gossip import GossipQueue, retransmissions
from exo_mesh.mesh.membership.known_peers import KnownPeers
from exo_mesh.mesh.membership.peer_filter import PeerFilter
from exo_mesh.mesh.membership.peers import ITSELF, MAX_PEERS, Peer
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.mesh.membership.records import Records
from exo_mesh.mesh.membership.refusals import REFUSED_S, Refusals
from exo_mesh.mesh.membership.swim import GONE, SMALL, Life, Swim, SwimState, Update

RECORD_HOPS = 4
"""How often each peer of a mesh of more than SMALL passes a changed record on: that reaches 98 % of the peers, and
anti-entropy reaches the rest."""

MAX_LOST = 256
AWAITED_S = 60.0
"""How long a node that has started waits for the peers that it knows from before."""

LOST_S = 600.0
"""How long addresses of dead peers are still tried, one each period: after a partition nothing else reunites the
halves. A peer that said goodbye is not among them."""

_log = logging.getLogger(__name__)


class AdmitResult(Enum):
    """Result of `Roster.admit`."""

    NEW = "new"
    KNOWN = "known"
    REFUSED = "refused"


class Roster:
    """Shared state. `peers`: admitted peers by id. `swim`: their states. `records`: what they wrote. `news`: updates to
    gossip.

    on_leave(peer, records) is called when a peer has died or left, with its records that were in force. `changed` beats
    whenever the view or the set of living peers changes; `poke` beats when there is news.
    """

    def __init__(
        self,
        own: PeerInfo,
        *,
        on_leave: Callable[[PeerInfo, list[Record]], None],
        timing: Timing,
        clock: Clock,
        rng: random.Random,
        dial: Callable[[str], ControlPort],
        peer_filter: PeerFilter,
    ) -> None:
        self.own = own
        self.peer_filter = peer_filter
        self.timing = timing
        self.clock = clock
        self.rng = rng
        self.dial = dial
        self.peers: dict[str, Peer] = {}
        self.swim = Swim(own.id, own.incarnation, timing, rng)
        self.records = Records(own.id, own.incarnation, self._incarnation_of)
        self.news: GossipQueue[str | RecordKey] = GossipQueue()
        self.changed = ChangeSignal()
        self.poke = ChangeSignal()
        self.has_fresh_news = False
        self._refusals = Refusals()
        self._id_taken = "", -REFUSED_S
        self.tasks = TaskOwner()
        self._on_leave = on_leave
        self.wall_clock: Clock = time.time
        self.known = KnownPeers()
        self.is_asleep = False
        """Whether this machine sleeps or is about to: the node sends nothing."""
        self.takes_datagrams = False
        """Whether probes of this node may be datagrams."""
        self._lost: dict[str, tuple[str, float, PeerInfo]] = {}
        self._gone: dict[str, tuple[float, PeerInfo]] = {}
        self._started_at = clock()

    @property
    def view(self) -> View:
        return self.records.view

    def client_of(self, peer_id: str) -> ControlPort | None:
        """The client of a living peer."""
        peer = self.peers.get(peer_id)
        return None if peer is None else peer.client

    def take_fences(self, fences: Iterable[Fence]) -> None:
        """Store deletions of instances; `changed` beats if one of them is new."""
        new = [fence for fence in fences if self.records.fences.add(fence, self.clock())]
        if new:
            _log.info("deleted instances: %s", ", ".join(fence.instance_id for fence in new[:8]))
            self.changed.beat()

    @property
    def sums(self) -> tuple[int, int]:
        """Of all records, and of all deletions of instances: equal where two peers hold the same."""
        return self.records.view.sum, self.records.fences.sum

    @property
    def is_small(self) -> bool:
        """Whether every peer probes and gossips to every other peer."""
        return len(self.peers) <= SMALL

    def knows(self, peer_id: str, incarnation: int) -> Peer | None:
        """The living peer that calls, or None if it is unknown; its call counts as a sign of life."""
        peer = self.peers.get(peer_id)
        if peer is None or peer.info.incarnation != incarnation:
            return None
        peer.last_heard = self.clock()
        return peer

    def verdict_on(self, peer_id: str, life: Life) -> Update | None:
        """The verdict of this node that the caller is gone, which it must refute; None if there is none for this
        life."""
        held = self.swim.member(peer_id)
        if held is None or held.state not in GONE or held.life < life:
            return None
        return Update(peer_id, held.state, held.life)

    @property
    def refusals(self) -> list[str]:
        """The last refused peers and the reasons."""
        return self._refusals.texts(self.clock())

    def note_refusal(self, who: str, reason: str, *, peer_id: str = "", address: str = "") -> None:
        """Remember and log why this node and another one cannot form a mesh."""
        if reason == ITSELF:
            return
        if self._refusals.note(who, reason, self.clock(), peer_id=peer_id, address=address):
            _log.warning("cannot form a mesh with %s: %s", who, reason)

    @property
    def id_taken_by(self) -> str:
        """The name of the node that has this node's id, if that keeps this node out of the mesh; otherwise ""."""
        name, at = self._id_taken
        return name if not self.peers and self.clock() - at < REFUSED_S else ""

    def note_id_taken(self, name: str) -> None:
        """Record that a node refused this one because another node, with this name, has its id."""
        if not self.id_taken_by:
            _log.error("this node's id is in use by %s: give this machine its own --home", name)
        self._id_taken = name, self.clock()

    def admit(self, info: PeerInfo, life: Life, addresses: list[str]) -> AdmitResult:
        """Admit a peer, unless it is known or considered dead in this life."""
        if obstacle := self.peer_filter.obstacle(addresses):
            self.note_refusal(info.name, obstacle, peer_id=info.id)
            return AdmitResult.REFUSED
        addresses = self.peer_filter.dialable(addresses)
        known = self.peers.get(info.id)
        if known is not None:
            if known.info.incarnation >= info.incarnation:
                known.last_heard = self.clock()
                known.learn(addresses)
                return AdmitResult.KNOWN
            self.swim.conclude(info.id, Life(known.info.incarnation, 2**32), self.clock())
            self.remove(known, "restarted")
        if len(self.peers) >= MAX_PEERS or not addresses:
            self.note_refusal(info.name, f"it has no usable address, or the mesh is full ({len(self.peers)} peers)")
            return AdmitResult.REFUSED
        if not self.swim.learn(Update(info.id, SwimState.ALIVE, life), self.clock()):
            return AdmitResult.REFUSED
        self.peers[info.id] = Peer(info, addresses, self.dial(addresses[0]), self.clock())
        self._lost.pop(info.id, None)
        self._refusals.joined(info.id, addresses)
        self.known.met(info)
        self.tell_of(info.id)
        _log.info("peer %s (%s) joined from %s", info.name, info.id[:8], addresses[0])
        return AdmitResult.NEW

    def everybody(self) -> list[PeerInfo]:
        return [self.own, *(self.peers[peer_id].info for peer_id in sorted(self.peers))]

    def bury(self, peer_id: str) -> None:
        """Remove a peer that this node has found to be dead, and gossip that."""
        self.tell_of(peer_id)
        if (peer := self.peers.get(peer_id)) is not None:
            self.remove(peer, "is dead", is_lost=True)

    def remove(self, peer: Peer, why: str, level: int = logging.WARNING, *, is_lost: bool = False) -> None:
        """Forget a peer and all its records. is_lost: it may still be alive, so its address is tried again."""
        del self.peers[peer.id]
        self.known.met(self._newest_info(peer))
        self._gone[peer.id] = (self.clock(), peer.info)
        while len(self._gone) > MAX_LOST:
            del self._gone[next(iter(self._gone))]
        if is_lost:
            self._lost[peer.id] = (peer.client.address, self.clock(), peer.info)
        self.tasks.start(peer.close_when_idle(), f"close {peer.id[:8]}")
        records = self.records.forget(peer.id)
        _log.log(level, "peer %s (%s) %s", peer.info.name, peer.id[:8], why)
        self._on_leave(peer.info, records)
        self.changed.beat()

    def _newest_info(self, peer: Peer) -> PeerInfo:
        """The peer's latest description of itself."""
        record = self.view.get(RecordKey("peer", peer.id, peer.id))
        return record.value if record is not None and isinstance(record.value, PeerInfo) else peer.info

    def a_lost_address(self, now: float) -> str | None:
        """A random address of a peer that was given up, to be tried again."""
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        for peer_id in [peer_id for peer_id, (_, since, _) in self._lost.items() if now - since > LOST_S]:
            del self._lost[peer_id]
        return self.rng.choice(list(self._lost.values()))[0] if self._lost else None

    def lost(self, now: float) -> list[tuple[PeerInfo, float]]:
        """Peers that were given up within LOST_S and have not returned, each with the seconds since then."""
        gone = [(info, now - since) for _, since, info in self._lost.values()]
        return [(info, gone_s) for info, gone_s in gone if gone_s <= LOST_S and info.id not in self.peers]

    def gone(self, now: float) -> list[PeerInfo]:
        """Peers that were given up or said goodbye within LOST_S and may return. A peer that is refused here will not.
        A returned peer counts until it has announced its models again."""
        kept = [(since, info) for since, info in self._gone.values() if not self._is_back(info)]
        recent = [info for since, info in kept if now - since <= LOST_S]
        return [info for info in recent if not self._refusals.holds(info.id, info.addresses, now)]

    def _is_back(self, info: PeerInfo) -> bool:
        found = self.peers.get(info.id)
        return found is not None and set(info.models) <= set(found.info.models)

    def awaited(self, now: float) -> list[str]:
        """Names of the peers that an earlier start of this node has met, and that may still join: for AWAITED_S."""
        if now - self._started_at > AWAITED_S:
            return []
        return [one.name for one in self.known.awake if one.id not in self.peers and one.id not in self._gone]

    def tell_of(self, key: str | RecordKey, *, own: bool = False) -> None:
        """Gossip news of a peer (its id) or of a record (its key). own: whether this node wrote the record."""
        num_others = len(self.peers)
        small = self.is_small
        held = self.swim.member(key) if isinstance(key, str) else None
        if held is not None and held.state is SwimState.ALIVE and held.life.refutation == 0 and not small:
            times = RECORD_HOPS  # a join is not urgent
        elif isinstance(key, str):
            times = max(retransmissions(num_others), num_others if small else 0)
        elif small:
            times = num_others if own else 2  # its owner sends it to every peer
        else:
            times = RECORD_HOPS
        self.news.put(key, times)
        self.has_fresh_news = True
        self.poke.beat()

    def _incarnation_of(self, peer_id: str) -> int | None:
        peer = self.peers.get(peer_id)
        return None if peer is None else peer.info.incarnation
