"""The peers of this node: admission by hello, who lives (membership/swim.py), and the records of all.

Three things go on, each bounded per peer however large the mesh is. Probes ask who lives. News (of peers, and of
records that changed) is told to a few peers at once and rides on every probe. Anti-entropy compares a digest with one
random peer each period, and exchanges what differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from exo_mesh.clock import Clock, monotonic
from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.view import InstanceInfo, Record, RecordKey, View
from exo_mesh.errors import MeshError, StrangerError, TransportError
from exo_mesh.membership.detector import LAN, Timing
from exo_mesh.membership.dialer import Dialer
from exo_mesh.membership.gossip import GossipQueue, retransmissions
from exo_mesh.membership.messages import (
    summary_to_proto,
    update_from_proto,
    update_in_summary,
    update_to_proto,
)
from exo_mesh.membership.peers import ITSELF, MAX_PEERS, Peer, addresses_of, reached_at, refusal
from exo_mesh.membership.records import Records
from exo_mesh.membership.swim import ALL_PROBED, GONE, Life, State, Swim, Update
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.tasks import Pulse, TaskOwner
from exo_mesh.transport import control_codec as codec
from exo_mesh.transport.control_client import ControlClient

MIN_PAUSE_S = 0.02
"""However often records change, news is not sent more often than this."""

FANOUT = 3
"""Peers that are told news at a time in a mesh of more than ALL_PROBED; in a smaller one, all."""

RECORD_HOPS = 4
"""How often each peer passes a changed record on in such a mesh: that reaches 98 %; anti-entropy does the rest."""

MAX_NEWS = 12
MAX_READINGS = 8
"""Items in one message. A probe has half as many readings as an exchange; where all are probed, only one's own."""

MAX_LOST = 256
LOST_S = 600.0
"""Addresses of dead peers that are still tried, one each period: after a partition nobody else brings the halves
together. A peer that said goodbye is not among them."""

_log = logging.getLogger(__name__)


async def _nothing() -> None:
    """What there is to free before a refutation, by default."""


class Membership:
    """Starts alone; `suggest` brings it together with others.

    on_leave(peer, records) is called when a peer has died or left, with the records of it that were in force;
    before_refute is awaited when the others hold this node for dead (it stood still, or was cut off), with the view up
    to date, before they hear that it lives: what they have given to others meanwhile must be freed first.
    `changed` beats whenever the view or the set of living peers has changed.
    """

    def __init__(
        self,
        own: PeerInfo,
        read_telemetry: Callable[[], Telemetry],
        *,
        on_leave: Callable[[PeerInfo, list[Record]], None] = lambda peer, records: None,
        before_refute: Callable[[], Awaitable[None]] = _nothing,
        timing: Timing = LAN,
        clock: Clock = monotonic,
        rng: random.Random | None = None,
        dial: Callable[[str], ControlClient] = ControlClient,
    ) -> None:
        self.own = own
        self.changed = Pulse()
        self.refusals: deque[str] = deque(maxlen=16)
        self._read_telemetry = read_telemetry
        self._on_leave = on_leave
        self._before_refute = before_refute
        self._timing = timing
        self._clock = clock
        self._rng = rng or random.Random()
        self._dial = dial
        self._peers: dict[str, Peer] = {}
        self._lost: dict[str, tuple[str, float]] = {}
        self._swim = Swim(own.id, own.incarnation, timing, self._rng)
        self._news: GossipQueue[str | RecordKey] = GossipQueue()
        self._poke = Pulse()
        self._fresh = False
        self._sync_at = self._tell_at = 0.0
        self._probing: set[str] = set()
        self._syncing: set[str] = set()
        self._rising = False
        self._tasks = TaskOwner()
        self._dialer = Dialer(self._say_hello, self._tasks, clock)
        self._records = Records(own.id, own.incarnation, self._incarnation_of)

    # what the node sees

    @property
    def view(self) -> View:
        return self._records.view

    @property
    def telemetry(self) -> dict[str, Telemetry]:
        """The latest reading of each living peer and of this one."""
        self._records.take_telemetry(self._read_telemetry())
        return dict(self._records.telemetry)

    @property
    def peers(self) -> list[Peer]:
        """The other living peers, by id."""
        return [self._peers[peer_id] for peer_id in sorted(self._peers)]

    def peer(self, peer_id: str) -> Peer | None:
        return self._peers.get(peer_id)

    def is_alive(self, peer_id: str) -> bool:
        return peer_id == self.own.id or peer_id in self._peers

    # life

    def start(self, own: PeerInfo) -> None:
        """Begin as `own`, which may now know its addresses."""
        self.describe(own)
        self._tasks.start(self._run(), "membership")

    def describe(self, own: PeerInfo) -> None:
        """Say something new of this node: its models, its API address."""
        self.own = own
        self._announce(self._records.write("peer", own.id, own, self._clock()))

    def put_instance(self, instance_id: str, instance: InstanceInfo | None) -> None:
        """Write or delete (None) this node's record of an instance."""
        self._announce(self._records.write("instance", instance_id, instance, self._clock()))

    async def stop(self) -> None:
        """Say goodbye; no task or channel is left."""
        goodbye = pb.GoodbyeRequest(peer_id=self.own.id, incarnation=self.own.incarnation)
        peers = self.peers
        await asyncio.gather(*(peer.client.goodbye(goodbye, 0.5) for peer in peers), return_exceptions=True)
        await self._tasks.close()
        await asyncio.gather(*(peer.close() for peer in peers))
        self._peers.clear()

    def suggest(self, address: str) -> None:
        """There may be a node at "host:port": say hello unless it is known or was tried a moment ago."""
        known = any(address == peer.client.address or address in peer.addresses for peer in self._peers.values())
        if not known and address not in self.own.addresses:
            self._dialer.dial(address)

    # what other nodes ask

    async def answer_hello(self, request: pb.HelloRequest, caller_host: str) -> pb.HelloReply:
        """Admit the caller, or say why not."""
        caller = codec.peer_from_proto(request.peer)
        reply = pb.HelloReply(peer=codec.peer_to_proto(self.own), refutation=self._swim.life.refutation)
        reply.reason = refusal(self.own, caller) or await self._clash(caller)
        life = Life(caller.incarnation, request.refutation)
        if reply.reason:
            self._note_refusal(f"{caller.name} at {caller_host}", reply.reason)
        elif (verdict := self._verdict_on(caller.id, life)) is not None:
            reply.reason = f"{caller.name} is held for {verdict.state} here"
            reply.verdict.CopyFrom(update_to_proto(verdict))
        else:
            self._admit(caller, life, addresses_of(caller, caller_host))
            reply.accepted = True
        return reply

    def answer_probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        """Yes, this is who lives here; and news for news."""
        own = self.own
        reply = pb.ProbeReply(peer_id=own.id, incarnation=own.incarnation)
        if self._knows(request.from_peer, request.incarnation):
            self._hear(request.updates, request.records, request.telemetry, self._peers[request.from_peer].client)
            if any(update.peer_id == own.id and update.state != pb.PEER_STATE_ALIVE for update in request.updates):
                reply.updates.append(self._update_message(own.id))  # who doubts it hears at once that we live
            updates, records = self._news_for(request.from_peer)
            reply.updates.extend(updates)
            reply.records.extend(records)
            reply.telemetry.extend(self._probe_readings())
        else:
            reply.unknown_sender = True
        return reply

    async def answer_indirect_probe(self, request: pb.IndirectProbeRequest) -> pb.IndirectProbeReply:
        """Can this node reach somebody whom the caller cannot?"""
        peer = self._peers.get(request.target)
        if peer is None or peer.info.incarnation != request.incarnation:
            return pb.IndirectProbeReply()
        try:
            await self._ask(peer, 0.8 * self._timing.probe_s)  # so that the caller hears of a failure in its time
        except MeshError:
            return pb.IndirectProbeReply()
        return pb.IndirectProbeReply(reached=True)

    def answer_exchange(self, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        """One half of a round of anti-entropy, as the side that was called."""
        now = self._clock()
        reply = pb.ExchangeReply()
        if self._knows(request.from_peer, request.incarnation):
            self._hear(request.updates, request.push, request.telemetry, self._peers[request.from_peer].client)
            reply.telemetry.extend(self._readings())
        elif self._swim.member(request.from_peer) is None:
            return pb.ExchangeReply(unknown_sender=True)
        else:  # held for dead: it may look, to learn what it must free before it comes back
            reply.unknown_sender = True
        for owner in request.want:
            reply.newer.extend(self._records.messages_of(owner, now))
        if not request.want and not request.push and request.digest != self.view.sum:
            reply.summary.extend(self._summaries())
        return reply

    def answer_goodbye(self, request: pb.GoodbyeRequest) -> pb.GoodbyeReply:
        """The caller leaves on purpose."""
        held = self._swim.member(request.peer_id)
        if held is not None and held.life.incarnation == request.incarnation:
            self._learn(Update(request.peer_id, State.LEFT, held.life), None)
        return pb.GoodbyeReply()

    # admission

    async def _say_hello(self, address: str) -> bool:
        """Introduce ourselves at an address; True if a peer answers and both sides accept each other."""
        client = self._dial(address)
        try:
            reply = await self._hello_with(client)
            answered = codec.peer_from_proto(reply.peer)
        except StrangerError as exc:
            self._note_refusal(address, str(exc))
            return False
        except MeshError as exc:
            _log.debug("no hello from %s: %s", address, exc)
            return False
        finally:
            await client.close()
        reason = reply.reason if not reply.accepted else refusal(self.own, answered)
        if reason:
            if not reply.HasField("verdict"):
                self._note_refusal(f"{answered.name} at {address}", reason)
            return False
        life = Life(answered.incarnation, reply.refutation)
        return self._admit(answered, life, reached_at(answered, address))

    async def _hello_with(self, client: ControlClient) -> pb.HelloReply:
        """Say hello; if we are held for dead there, refute that and say it again."""
        reply = pb.HelloReply()
        for _ in range(2):
            request = pb.HelloRequest(peer=codec.peer_to_proto(self.own), refutation=self._swim.life.refutation)
            reply = await client.hello(request, self._timing.call_s)
            verdict = update_from_proto(reply.verdict) if reply.HasField("verdict") else None
            if verdict is None or not self._swim.is_accused(verdict):
                break
            await self._rise(verdict, client)
        return reply

    async def _clash(self, caller: PeerInfo) -> str:
        """Is the caller's id in use by another process that still answers?"""
        known = self._peers.get(caller.id)
        if known is None or (known.info.incarnation == caller.incarnation and known.info.name == caller.name):
            return ""
        if known.info.incarnation > caller.incarnation:
            return f"id {caller.id[:8]} is known with a later start (incarnation {known.info.incarnation})"
        try:
            reply = await known.client.hello(pb.HelloRequest(peer=codec.peer_to_proto(self.own)), 1.0)
        except MeshError:
            return ""
        if reply.peer.id == caller.id and reply.peer.incarnation == known.info.incarnation:
            return f"id {caller.id[:8]} is in use by {known.info.name} at {known.client.address}"
        return ""

    def _verdict_on(self, peer_id: str, life: Life) -> Update | None:
        """What this node holds against a caller of this life."""
        held = self._swim.member(peer_id)
        if held is None or held.state not in GONE or held.life < life:
            return None
        return Update(peer_id, held.state, held.life)

    def _note_refusal(self, who: str, reason: str) -> None:
        text = f"{who}: {reason}"
        if reason != ITSELF and text not in self.refusals:
            _log.warning("refused: %s", text)
            self.refusals.append(text)

    def _admit(self, info: PeerInfo, life: Life, addresses: list[str], *, vouched: bool = False) -> bool:
        """Take a peer in, unless it is known in this life or held for dead in it; False if it is not in afterwards.

        vouched: on the word of another peer. Then nothing is asked of it now: a mesh of n would do so n² times.
        """
        known = self._peers.get(info.id)
        if known is not None:
            if known.info.incarnation >= info.incarnation:
                known.last_heard = self._clock()
                known.learn(addresses)
                return True
            self._swim.conclude(info.id, Life(known.info.incarnation, 2**32), self._clock())
            self._remove(known, "has restarted")
        if len(self._peers) >= MAX_PEERS or not addresses:
            self._note_refusal(info.name, f"{len(self._peers)} peers are known already, or it has no address")
            return False
        if not self._swim.learn(Update(info.id, State.ALIVE, life), self._clock()):
            return False
        peer = Peer(info, addresses, self._dial(addresses[0]), self._clock())
        self._peers[info.id] = peer
        self._lost.pop(info.id, None)
        self._tell_of(info.id)
        _log.info("peer %s (%s) joined from %s", info.name, info.id[:8], addresses[0])
        if not vouched:
            self._start_sync(peer)
        self.changed.beat()
        return True

    def _remove(self, peer: Peer, why: str, level: int = logging.WARNING) -> None:
        del self._peers[peer.id]
        self._tasks.start(peer.close_when_idle(), f"close {peer.id[:8]}")
        records = self._records.forget(peer.id)
        _log.log(level, "peer %s (%s) %s", peer.info.name, peer.id[:8], why)
        self._on_leave(peer.info, records)
        self.changed.beat()

    # what goes on

    async def _run(self) -> None:
        tick_s = min(self._timing.gossip_s, self._timing.period_s / 4)
        while True:
            self._step(self._clock())
            self._fresh = False
            await asyncio.sleep(MIN_PAUSE_S)
            if not self._fresh:
                await self._poke.wait(tick_s)

    def _step(self, now: float) -> None:
        step = self._swim.tick(now)
        for verdict in step.dead:
            self._bury(verdict.peer_id)
        for peer_id in step.probes:
            self._start_probe(self._peers[peer_id])
        if now >= self._sync_at:
            self._sync_at = now + self._timing.period_s
            self.view.expire(now)
            self._redial(now)
            if self._peers:
                self._start_sync(self._peers[self._rng.choice(list(self._peers))])
        small = len(self._peers) <= ALL_PROBED
        if self._news and self._peers and (small or now >= self._tell_at):
            self._tell_at = now + self._timing.gossip_s
            listeners = list(self._peers) if small else self._rng.sample(list(self._peers), FANOUT)
            for peer_id in listeners:
                self._tasks.start(self._tell(self._peers[peer_id]), f"tell {peer_id[:8]}")

    def _bury(self, peer_id: str) -> None:
        """This node has come to the verdict that a peer is dead."""
        self._tell_of(peer_id)
        if (peer := self._peers.get(peer_id)) is not None:
            self._lost[peer_id] = (peer.client.address, self._clock())
            self._remove(peer, "is dead")

    def _start_probe(self, peer: Peer) -> None:
        if peer.id not in self._probing:
            self._probing.add(peer.id)
            self._tasks.start(self._probe(peer), f"probe {peer.id[:8]}")

    def _redial(self, now: float) -> None:
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        for peer_id in [peer_id for peer_id, (_, since) in self._lost.items() if now - since > LOST_S]:
            del self._lost[peer_id]
        if self._lost:
            self._dialer.dial(self._rng.choice(list(self._lost.values()))[0])

    async def _probe(self, peer: Peer) -> None:
        began = self._clock()
        timeout_s = self._swim.probe_timeout_s
        try:
            await self._ask(peer, timeout_s)
            self._swim.acked(peer.id, self._clock())
            return
        except MeshError as exc:
            reason = exc
        finally:
            self._probing.discard(peer.id)
        helpers = [self._peers[one] for one in self._swim.helpers(peer.id)]
        request = pb.IndirectProbeRequest(
            from_peer=self.own.id, target=peer.id, incarnation=peer.info.incarnation
        )  # fmt: skip
        answers_elsewhere, *replies = await asyncio.gather(
            peer.try_next_address(),
            *(helper.client.indirect_probe(request, timeout_s) for helper in helpers),
            return_exceptions=True,
        )
        answers = [reply for reply in replies if isinstance(reply, pb.IndirectProbeReply)]
        now = self._clock()
        if answers_elsewhere is True or any(reply.reached for reply in answers):
            self._swim.acked(peer.id, now)
        elif news := self._swim.failed(peer.id, began, now, asked=len(helpers), answered=len(answers)):
            if news.state is State.DEAD:
                self._bury(peer.id)
            else:
                _log.info("peer %s (%s) is suspected: %s", peer.info.name, peer.id[:8], reason)
                self._tell_of(peer.id)

    async def _tell(self, peer: Peer) -> None:
        try:
            await self._ask(peer, self._timing.call_s)
        except MeshError:
            self._ask_after_failure(peer)

    def _ask_after_failure(self, peer: Peer) -> None:
        """A call that was no probe has failed: that may be the first sign of a death, so probe without waiting for its
        turn."""
        if self._peers.get(peer.id) is peer:
            self._start_probe(peer)

    async def _ask(self, peer: Peer, timeout_s: float) -> None:
        """A probe, with news both ways. Raises MeshError if the peer does not answer, or somebody else does."""
        updates, records = self._news_for(peer.id)
        request = pb.ProbeRequest(
            from_peer=self.own.id,
            incarnation=self.own.incarnation,
            target=peer.id,
            updates=updates,
            records=records,
            telemetry=self._probe_readings(),
        )
        began = self._clock()
        reply = await peer.client.probe(request, timeout_s)
        if (reply.peer_id, reply.incarnation) != (peer.id, peer.info.incarnation):
            raise TransportError(f"the node at {peer.client.address} is not {peer.info.name} of this start")
        peer.answered(began, self._clock())
        if reply.unknown_sender:
            await self._introduce_again(peer)
        else:
            self._hear(reply.updates, reply.records, reply.telemetry, peer.client)

    async def _introduce_again(self, peer: Peer) -> None:
        """The peer has forgotten us: it gave us up for dead, or it has not heard of us yet."""
        reply = await self._hello_with(peer.client)
        if not reply.accepted or reply.peer.id != peer.id:
            raise TransportError(f"{peer.info.name} at {peer.client.address} does not take us in: {reply.reason}")
        self._start_sync(peer)

    async def _rise(self, verdict: Update, client: ControlClient) -> None:
        """The others hold us for dead: see what has changed, free what is not ours any more, then say that we live."""
        if self._rising:
            raise TransportError("this node is busy with coming back")
        self._rising = True
        await self._come_back(verdict, client)

    async def _come_back(self, verdict: Update, client: ControlClient) -> None:
        try:
            _log.warning("this node is held for %s by others; coming back", verdict.state)
            with contextlib.suppress(MeshError):
                await self._exchange(client)
            await self._before_refute()
            self._swim.refute(verdict)
            self._tell_of(self.own.id)
        finally:
            self._rising = False

    # anti-entropy

    def _start_sync(self, peer: Peer) -> None:
        if peer.id not in self._syncing:
            self._syncing.add(peer.id)
            self._tasks.start(self._sync(peer), f"exchange with {peer.id[:8]}")

    async def _sync(self, peer: Peer) -> None:
        try:
            known_there = await self._exchange(peer.client)
            if not known_there:
                await self._hello_with(peer.client)
        except MeshError as exc:
            _log.debug("no exchange with %s: %s", peer.info.name, exc)
            self._ask_after_failure(peer)
        finally:
            self._syncing.discard(peer.id)

    async def _exchange(self, client: ControlClient) -> bool:
        """A round of anti-entropy: two calls if there is a difference, one if there is none. False if we are unknown
        there."""
        own = self.own
        request = pb.ExchangeRequest(
            from_peer=own.id, incarnation=own.incarnation, digest=self.view.sum, telemetry=self._readings()
        )
        reply = await client.exchange(request, self._timing.call_s)
        self._hear(reply.updates, (), reply.telemetry, client)
        if not reply.summary:
            return not reply.unknown_sender
        second = pb.ExchangeRequest(from_peer=own.id, incarnation=own.incarnation, digest=self.view.sum)
        lives = self._compare(reply.summary, second, client)
        if second.want or second.push or second.updates:
            reply = await client.exchange(second, self._timing.call_s)
            self._take(reply.newer, lives)
        return not reply.unknown_sender

    def _compare(
        self, summaries: Iterable[pb.OwnerSummary], second: pb.ExchangeRequest, client: ControlClient
    ) -> dict[str, Life]:
        """Fill in the second half of a round; answers the lives of peers that only the other side knows."""
        now = self._clock()
        lives: dict[str, Life] = {}
        there: set[str] = set()
        for summary in summaries:
            told = update_in_summary(summary)
            if told is None:
                continue
            held = self._swim.member(told.peer_id)
            if told.state in GONE or told.peer_id == self.own.id or held is not None:
                self._hear_of(told, None, client)
            if told.state in GONE:
                continue
            there.add(told.peer_id)
            if told.peer_id != self.own.id and told.peer_id not in self._peers:
                if held is None or told.life > held.life:
                    lives[told.peer_id] = told.life
                    second.want.append(told.peer_id)
                continue
            push, want = self._records.differs(summary)
            if push:
                second.push.extend(self._records.messages_of(told.peer_id, now))
            if want and told.peer_id != self.own.id:
                second.want.append(told.peer_id)
        for peer_id in [self.own.id, *self._peers]:
            if peer_id not in there:
                second.updates.append(self._update_message(peer_id))
                second.push.extend(self._records.messages_of(peer_id, now))
        return lives

    def _summaries(self) -> list[pb.OwnerSummary]:
        held = [*self._swim.updates(), Update(self.own.id, State.ALIVE, self._swim.life)]
        return [summary_to_proto(one, self.view.newest_of(one.peer_id), self.view.sum_of(one.peer_id)) for one in held]

    # news

    def _tell_of(self, key: str | RecordKey, *, own: bool = False) -> None:
        """Pass news of a peer (its id) or of a record on."""
        num_others = len(self._peers)
        small = num_others <= ALL_PROBED
        held = self._swim.member(key) if isinstance(key, str) else None
        if held is not None and held.state is State.ALIVE and held.life.refutation == 0 and not small:
            times = RECORD_HOPS  # a join, with its record: nobody's life hangs on it
        elif isinstance(key, str):
            times = max(retransmissions(num_others), num_others if small else 0)
        elif small:
            times = num_others if own else 2  # its owner tells everybody
        else:
            times = RECORD_HOPS
        self._news.put(key, times)
        self._fresh = True
        self._poke.beat()

    def _announce(self, key: RecordKey) -> None:
        self.changed.beat()
        self._tell_of(key, own=True)

    def _news_for(self, peer_id: str) -> tuple[list[pb.PeerUpdate], list[pb.Record]]:
        updates, records = [], []
        for key in self._news.take(MAX_NEWS):
            if isinstance(key, str):
                updates.append(self._update_message(key))
            elif (record := self._records.message(key, self._clock())) is not None:
                records.append(record)
        held = self._swim.member(peer_id)
        if held is not None and held.state is State.SUSPECT:
            updates.append(self._update_message(peer_id))  # it must hear of it, to refute it
        return updates, records

    def _update_message(self, peer_id: str) -> pb.PeerUpdate:
        update = Update(peer_id, State.ALIVE, self._swim.life)
        if peer_id != self.own.id:
            told = self._swim.update_of(peer_id)
            if told is None:
                return pb.PeerUpdate()
            update = told
        record = None
        if update.state is State.ALIVE:
            record = self._records.message(RecordKey("peer", peer_id, peer_id), self._clock())
        return update_to_proto(update, record)

    def _hear(
        self,
        updates: Iterable[pb.PeerUpdate],
        records: Iterable[pb.Record],
        readings: Iterable[pb.Telemetry],
        teller: ControlClient,
    ) -> None:
        for message in updates:
            update = update_from_proto(message)
            if update is not None:
                self._hear_of(update, message.record if message.HasField("record") else None, teller)
        for record in self._take(records, {}):
            self._tell_of(record.key)
        for reading in readings:
            self._records.take_telemetry(codec.telemetry_from_proto(reading))

    def _hear_of(self, update: Update, record: pb.Record | None, teller: ControlClient) -> None:
        if update.peer_id != self.own.id:
            self._learn(update, record)
        elif not self._swim.is_accused(update):
            return
        elif update.state is State.SUSPECT:
            self._swim.refute(update)
            self._tell_of(self.own.id)
        elif update.state is State.DEAD and not self._rising:
            self._rising = True
            self._tasks.start(self._come_back(update, teller), "coming back")

    def _learn(self, update: Update, record: pb.Record | None) -> None:
        peer = self._peers.get(update.peer_id)
        if update.state is State.ALIVE and (peer is None or peer.info.incarnation < update.life.incarnation):
            if record is not None:
                self._take([record], {update.peer_id: update.life})
            return
        if not self._swim.learn(update, self._clock()):
            return
        self._tell_of(update.peer_id)
        held = self._swim.member(update.peer_id)
        if held is not None and held.state in GONE and peer is not None:
            if update.state is State.DEAD:
                self._lost[peer.id] = (peer.client.address, self._clock())
            level = logging.INFO if update.state is State.LEFT else logging.WARNING
            self._remove(peer, "said goodbye" if update.state is State.LEFT else "is dead, others say", level)

    def _take(self, records: Iterable[pb.Record], lives: dict[str, Life]) -> list[Record]:
        """Merge records; peers of `lives` are taken in on the word of the sender, which has admitted them."""
        records = list(records)
        for message in records:
            if message.kind == "peer" and message.owner in lives and message.HasField("peer"):
                self._take_in(message, lives[message.owner])
        changed = self._records.take(records, self._clock())
        for record in changed:
            if isinstance(record.value, PeerInfo) and (peer := self._peers.get(record.value.id)):
                peer.info = replace(record.value, incarnation=peer.info.incarnation)
                peer.learn(peer.info.addresses)
        if changed:
            self.changed.beat()
        return changed

    def _take_in(self, message: pb.Record, life: Life) -> None:
        with contextlib.suppress(TransportError):
            info = codec.peer_from_proto(message.peer)
            if info.id == message.owner and info.incarnation == life.incarnation and not refusal(self.own, info):
                self._admit(info, life, reached_at(info), vouched=True)

    def _readings(self, most: int = MAX_READINGS) -> list[pb.Telemetry]:
        """Our own reading, and a few of what we have of others."""
        own = self._read_telemetry()
        if most == 1:
            return [codec.telemetry_to_proto(own)]
        others = [reading for peer_id, reading in self._records.telemetry.items() if peer_id != self.own.id]
        sample = self._rng.sample(others, min(most - 1, len(others)))
        return [codec.telemetry_to_proto(reading) for reading in (own, *sample)]

    def _probe_readings(self) -> list[pb.Telemetry]:
        return self._readings(1 if len(self._peers) <= ALL_PROBED else MAX_READINGS // 2)

    def _knows(self, peer_id: str, incarnation: int) -> bool:
        """Is this caller a living peer? Then its call is a sign of life."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.info.incarnation != incarnation:
            return False
        peer.last_heard = self._clock()
        return True

    def _incarnation_of(self, peer_id: str) -> int | None:
        peer = self._peers.get(peer_id)
        return None if peer is None else peer.info.incarnation
