"""The membership as the rest of the node sees it: the peers, the view, and the background tasks.

Three tasks run all the time, each with bounded work per peer in a mesh of any size. Probes find out which peers are
alive (probing.py, swim.py). News of peers and of changed records is sent to a few peers at once and is part of every
probe (news.py). Anti-entropy compares a digest with one random peer each period and exchanges what differs
(exchange.py). admission.py admits peers and lets them return; roster.py holds the shared state.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.domain import peer_names
from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo
from exo_mesh.domain.shared_settings import SharedSettings
from exo_mesh.domain.view import CardInfo, InstanceInfo, RecordKey, RecordValue, View
from exo_mesh.mesh.membership.admission import Admission
from exo_mesh.mesh.membership.calls import goodbye
from exo_mesh.mesh.membership.detector import LAN, Timing
from exo_mesh.mesh.membership.dialer import Dialer
from exo_mesh.mesh.membership.exchange import Exchange
from exo_mesh.mesh.membership.fences import Fence, Fences
from exo_mesh.mesh.membership.news import News
from exo_mesh.mesh.membership.own_side import OwnSide
from exo_mesh.mesh.membership.peer_filter import PeerFilter
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.port import Calls, ControlPort
from exo_mesh.mesh.membership.prefixes import PrefixNews
from exo_mesh.mesh.membership.probing import Probing
from exo_mesh.mesh.membership.roster import Roster
from exo_mesh.mesh.membership.sleeping import SleepDesk
from exo_mesh.mesh.membership.stopping import StopDesk
from exo_mesh.mesh.membership.swim import SwimState, Update
from exo_mesh.wire.peer_call import AnyAnswer

MAX_SILENT_PROBED = 8
"""Most peers that are probed each period because others reach them and this node does not."""

MAX_CLOSE_PROBED = 4
"""Peers of this node's own rings that are probed in each period."""

MAX_TOLD = 32
"""Peers that get a changed reading of this node at once."""

MIN_PAUSE_S = 0.02
"""Shortest pause between two rounds of news, however often records change."""

FANOUT = 3
"""Peers that get news in one round in a mesh of more than SMALL; in a smaller mesh, all peers do."""

OUT_OF_REACH = 3
"""A peer is out of reach after this many probe timeouts without an answer; that timeout grows while this machine is
slow."""


class Membership:
    """Starts alone; `suggest` connects it to other nodes.

    node: see OwnSide. dial(address) makes a client for "host:port" with the credentials of this node. answers() returns
    the answers of this node to calls; see Calls. peer_filter: by default every peer is admitted and every address
    dialled. `changed` beats whenever the view or the set of living peers changes.
    """

    def __init__(
        self,
        own: PeerInfo,
        node: OwnSide,
        dial: Callable[[str], ControlPort],
        *,
        answers: Callable[[], Iterable[AnyAnswer]] = tuple,
        peer_filter: PeerFilter | None = None,
        timing: Timing = LAN,
        clock: Clock = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._roster = roster = Roster(
            own,
            on_leave=node.peer_left,
            timing=timing,
            clock=clock,
            rng=rng or random.Random(),
            dial=dial,
            peer_filter=peer_filter or PeerFilter(),
        )
        self._tasks = roster.tasks
        self._node = node
        self._news = News(roster, node.reading, self._answer_verdict)
        self.exchange = Exchange(roster, self._news)
        self._prefixes = PrefixNews(roster, node.prefixes)
        self.probing = Probing(roster, self._news, self._prefixes, self._introduce_again, self._sync, node.is_calm)
        self.admission = Admission(roster, self.exchange, node.before_refute, self.probing.start)
        self._dialer = Dialer(self.admission.say_hello, self._tasks, clock)
        self._sync_at = self._gossip_at = 0.0
        self.calls = Calls(own.id, roster.client_of, answers)
        self.stops = StopDesk(roster, self.calls)
        self.sleeps = SleepDesk(roster, self.calls)

    # State for the rest of the node.

    @property
    def own(self) -> PeerInfo:
        return self._roster.own

    @property
    def changed(self) -> ChangeSignal:
        return self._roster.changed

    @property
    def refusals(self) -> list[str]:
        """The last refused nodes and the reasons."""
        return self._roster.refusals

    @property
    def id_taken_by(self) -> str:
        """See Roster.id_taken_by."""
        return self._roster.id_taken_by

    def take_datagrams(self) -> None:
        """Let peers send probes as datagrams from now on; `probing.answer_datagram` answers them."""
        self._roster.takes_datagrams = True

    @property
    def view(self) -> View:
        return self._roster.view

    @property
    def fences(self) -> Fences:
        """The deletions of instances that this node knows."""
        return self._roster.records.fences

    def take_fence(self, fence: Fence) -> None:
        """Remember a deleted instance. Anti-entropy sends the deletion to every peer that lacks it."""
        self._roster.take_fences([fence])

    @property
    def telemetry(self) -> Mapping[str, Telemetry]:
        """The latest telemetry of each living peer and of this node."""
        records = self._roster.records
        records.take_telemetry(self._node.reading())
        return records.telemetry

    @property
    def last_telemetry(self) -> Mapping[str, Telemetry]:
        """Like `telemetry`, but this node's own is from its last probe: up to a second old, and missing before the
        first probe."""
        return self._roster.records.telemetry

    def reading_of(self, peer_id: str) -> Telemetry | None:
        """The latest telemetry of a living peer."""
        reading = self._roster.records.readings.get(peer_id)
        return None if reading is None else reading.value

    def keys_digest_of(self, peer_id: str) -> tuple[int, int]:
        """(its sequence number, the digest of the API keys) of the latest telemetry of a living peer; (0, 0) without
        any."""
        reading = self._roster.records.readings.get(peer_id)
        return (0, 0) if reading is None else (reading.sequence, reading.keys_digest)

    def prefixes_of(self, peer_id: str) -> Mapping[str, bytes]:
        """The digests of what the drivers of a living peer keep, by instance; see domain/routing/digest.py."""
        return self._prefixes.of(peer_id)

    def busy(self, peer_id: str) -> float:
        """Processes per core that want to run on a peer; 0 if unknown."""
        peer, reading = self._roster.peers.get(peer_id), self.reading_of(peer_id)
        info = self.own if peer is None else peer.info
        cores = max((device.cores for device in info.devices), default=0)
        return 0.0 if reading is None or not cores else reading.load / cores

    def client_at(self, address: str) -> ControlPort:
        """A client with this node's credentials; the caller closes it."""
        return self._roster.dial(address)

    @property
    def peers(self) -> list[Peer]:
        """The other living peers, by id."""
        return [self._roster.peers[peer_id] for peer_id in sorted(self._roster.peers)]

    @property
    def lost(self) -> list[tuple[PeerInfo, float]]:
        """Peers that were given up within the last ten minutes, each with the seconds since then."""
        return self._roster.lost(self._roster.clock())

    @property
    def gone(self) -> list[PeerInfo]:
        """Peers that left or were given up within the last ten minutes."""
        return self._roster.gone(self._roster.clock())

    @property
    def awaited(self) -> list[str]:
        """Names of known peers that have not joined yet, for a minute after the start of this node."""
        return self._roster.awaited(self._roster.clock())

    @property
    def everybody(self) -> list[PeerInfo]:
        """This node and all live peers."""
        return self._roster.everybody()

    def peer_named(self, text: str, param: str = "node_id") -> PeerInfo:
        """This node or the live peer that a person means; "" is this node. Raises as peer_names.peer_named."""
        return peer_names.peer_named(text, self.everybody, param) if text else self.own

    @property
    def num_peers(self) -> int:
        """Number of other living peers, without the sorting of `peers`."""
        return len(self._roster.peers)

    def peer(self, peer_id: str) -> Peer | None:
        return self._roster.peers.get(peer_id)

    def is_alive(self, peer_id: str) -> bool:
        return peer_id == self.own.id or peer_id in self._roster.peers

    def unanswered_s(self, peer_id: str) -> float:
        """Seconds for which a peer has not answered this node although other peers reach it; 0 if it answers."""
        peer = self._roster.peers.get(peer_id)
        since = None if peer is None else peer.unanswered_since
        return 0.0 if since is None else self._roster.clock() - since

    def is_out_of_reach(self, peer_id: str) -> bool:
        """Whether a peer has not answered this node for so long that a lost or late message cannot be the reason. Also
        probes the peer now, because in a large mesh it is probed rarely."""
        peer = self._roster.peers.get(peer_id)
        if peer is None:
            return False
        self.probing.start(peer, by_call=True)
        return self.unanswered_s(peer_id) > OUT_OF_REACH * self._roster.swim.probe_timeout_s

    def check_partners(self) -> None:
        """Probe the peers that the stages of this node depend on by calls now, because a request begins."""
        for peer_id in self._ring_neighbours():
            if (peer := self._roster.peers.get(peer_id)) is not None:
                self.probing.start(peer, by_call=True)

    def tell_reading(self) -> None:
        """Send this node's telemetry to its peers now, because it changed in a way that they act on; in a large mesh to
        some of them. A peer that is not reached gets it with a later probe."""
        self._news.renew_reading()
        peers = list(self._roster.peers.values())
        for peer in self._roster.rng.sample(peers, min(MAX_TOLD, len(peers))):
            self.probing.start(peer, by_call=True)

    # Start and stop.

    def start(self, own: PeerInfo) -> None:
        """Start with the identity `own`, whose addresses may be known only now."""
        self.describe(own)
        self._tasks.keep(self._run, "membership")

    def describe(self, own: PeerInfo) -> None:
        """Publish new facts about this node, such as its models or its API address."""
        self._roster.own = own
        self._write("peer", own.id, own)

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    def put_instance(self, instance_id: str, instance: InstanceInfo | None) -> None:
        """Write or delete (None) this node's record of an instance."""
        self._write("instance", instance_id, instance)

    def put_download(self, model: str, download: DownloadInfo | None) -> None:
        """Write or delete (None) this node's record of a download."""
        self._write("download", model, download)

    def put_card(self, model: str, card: CardInfo | None) -> None:
        """Write or delete (None) this node's record of a custom model card."""
        self._write("card", model, card)

    def put_shared_settings(self, table: SharedSettings | None) -> None:
        """Write or delete (None) this node's record of the settings that the mesh shares."""
        self._write("settings", "mesh", table)

    def _write(self, kind: str, record_id: str, value: RecordValue | None) -> None:
        key: RecordKey = self._roster.records.write(kind, record_id, value, self._roster.clock())
        self._roster.changed.beat()
        self._roster.tell_of(key, own=True)

    async def stop(self) -> None:
        """Say goodbye to all peers, and close all tasks and connections."""
        peers = self.peers
        await asyncio.gather(*(goodbye(peer.client, self.own) for peer in peers), return_exceptions=True)
        await self._tasks.close()
        await asyncio.gather(*(peer.close() for peer in peers))
        self._roster.peers.clear()

    def suggest(self, address: str) -> None:
        """Say hello to a possible node at "host:port", unless it is known or was tried recently."""
        if self._roster.is_asleep:
            return
        peers = self._roster.peers.values()
        known = any(address == peer.client.address or address in peer.addresses for peer in peers)
        if not known and address not in self.own.addresses and self._roster.peer_filter.may_dial(address):
            self._dialer.dial(address)

    # Calls of other nodes.

    def note_stranger(self, who: str, reason: str, peer_id: str) -> None:
        """Record a hello of a node that cannot be in this mesh."""
        self._roster.note_refusal(who, reason, peer_id=peer_id)

    def peer_leaves(self, peer_id: str, incarnation: int, is_asleep: bool) -> None:
        """Handle the goodbye of a peer that leaves on purpose or goes to sleep."""
        held = self._roster.swim.member(peer_id)
        if held is not None and held.life.incarnation == incarnation:
            self._news.learn(Update(peer_id, SwimState.LEFT, held.life), None)
            if is_asleep:
                self._roster.known.fell_asleep(peer_id, self._roster.wall_clock())

    # The background loop.

    def _answer_verdict(self, verdict: Update, sender: ControlPort) -> None:
        self.admission.answer_verdict(verdict, sender)

    async def _introduce_again(self, peer: Peer) -> None:
        await self.admission.introduce_again(peer)

    async def _run(self) -> None:
        roster = self._roster
        while True:
            now = roster.clock()
            next_at = now + roster.timing.period_s if roster.is_asleep else self._step(now)
            roster.has_fresh_news = False
            if self._gossip_at > now:
                await asyncio.sleep(MIN_PAUSE_S)
            if not roster.has_fresh_news:
                await roster.poke.wait(max(MIN_PAUSE_S, next_at - roster.clock()))

    def _step(self, now: float) -> float:
        """Do the due work; returns when the next step is due, if no news comes before."""
        roster = self._roster
        is_due = now >= self._sync_at
        step = roster.swim.tick(now, self._ring_neighbours)
        for verdict in step.dead:
            roster.bury(verdict.peer_id)
        for peer_id in step.probes:
            self.probing.start(roster.peers[peer_id])
        if is_due:
            self._sync_at = now + roster.timing.period_s
            roster.view.expire(now)
            roster.records.fences.expire(now)
            if (address := roster.a_lost_address(now)) is not None:
                self._dialer.dial(address)
            silent = [peer for peer in roster.peers.values() if peer.unanswered_since is not None]
            for peer in silent[:MAX_SILENT_PROBED]:  # in a large mesh its regular probe comes much later
                self.probing.start(peer)
            if roster.peers:
                self._sync_with(roster.peers[roster.rng.choice(list(roster.peers))])
        if roster.news and roster.peers and (roster.is_small or now >= self._gossip_at):
            self._gossip_at = now + roster.timing.gossip_s
            everybody = list(roster.peers)
            for peer_id in everybody if roster.is_small else roster.rng.sample(everybody, FANOUT):
                self._tasks.start(self.probing.tell(roster.peers[peer_id]), f"news to {peer_id[:8]}")
        next_at = min(step.next_at, self._sync_at)
        return min(next_at, now + roster.timing.gossip_s) if roster.news and roster.peers else next_at

    def _sync_with(self, peer: Peer) -> None:
        """Compare all records with a peer, unless its answers to probes carry the sums: then any difference starts an
        exchange at once."""
        if not peer.sends_sums or self.admission.is_unproven(peer):
            self.admission.start_sync(peer)

    def _sync(self, peer: Peer) -> None:
        self.admission.start_sync(peer)

    def _ring_neighbours(self) -> list[str]:
        """Peers that the stages of this node depend on: of each ring the owner, and the stages before and after."""
        found: dict[str, None] = {}
        for owner, instance in self._roster.view.records_of_instances():
            peer_ids = instance.plan.peer_ids
            if self.own.id not in peer_ids:
                continue
            at = peer_ids.index(self.own.id)
            found |= dict.fromkeys((peer_ids[(at + 1) % len(peer_ids)], peer_ids[at - 1], owner))
        found.pop(self.own.id, None)
        return list(found)[:MAX_CLOSE_PROBED]
