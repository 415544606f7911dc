"""The peers of this node: admission by hello, a steady exchange of records with each, and who has died.

Every pair of peers exchanges records once a second, and at once when something changed. The exchange is also the
probe of liveness.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from exo_mesh.clock import Clock, monotonic
from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.view import InstanceInfo, Record, View
from exo_mesh.errors import MeshError, TransportError
from exo_mesh.membership.detector import LAN, Liveness, Timing
from exo_mesh.membership.dialer import Dialer
from exo_mesh.membership.peers import ITSELF, MAX_PEERS, Peer, addresses_of, refusal
from exo_mesh.membership.records import Records
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.tasks import Pulse, TaskOwner
from exo_mesh.transport import control_codec as codec
from exo_mesh.transport.control_client import ControlClient

MIN_PAUSE_S = 0.02
"""However often records change, a peer is not called more often than this."""

_log = logging.getLogger(__name__)


class Membership:
    """Starts alone; `suggest` brings it together with others.

    on_leave(peer, records) is called when a peer has died or left, with the records of it that were in force;
    `changed` beats whenever the view or the set of living peers has changed.
    """

    def __init__(
        self,
        own: PeerInfo,
        read_telemetry: Callable[[], Telemetry],
        *,
        on_leave: Callable[[PeerInfo, list[Record]], None] = lambda peer, records: None,
        timing: Timing = LAN,
        clock: Clock = monotonic,
    ) -> None:
        self.own = own
        self.changed = Pulse()
        self.refusals: deque[str] = deque(maxlen=16)
        self._read_telemetry = read_telemetry
        self._on_leave = on_leave
        self._timing = timing
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}
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

    def describe(self, own: PeerInfo) -> None:
        """Say something new of this node: its models, its API address."""
        self.own = own
        self._records.write("peer", own.id, own, self._clock())
        self._announce_change()

    def put_instance(self, instance_id: str, instance: InstanceInfo | None) -> None:
        """Write or delete (None) this node's record of an instance."""
        self._records.write("instance", instance_id, instance, self._clock())
        self._announce_change()

    async def stop(self) -> None:
        """Say goodbye and end; no task or channel is left."""
        goodbye = pb.GoodbyeRequest(peer_id=self.own.id, incarnation=self.own.incarnation)
        peers = self.peers
        await asyncio.gather(*(peer.client.goodbye(goodbye, 0.5) for peer in peers), return_exceptions=True)
        await self._tasks.close()
        await asyncio.gather(*(peer.client.close() for peer in peers))
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
        reason = refusal(self.own, caller) or await self._clash(caller)
        if reason:
            self._note_refusal(f"{caller.name} at {caller_host}", reason)
            return pb.HelloReply(accepted=False, reason=reason, peer=codec.peer_to_proto(self.own))
        self._admit(caller, addresses_of(caller, caller_host))
        return pb.HelloReply(accepted=True, peer=codec.peer_to_proto(self.own))

    async def answer_exchange(self, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        """One round of anti-entropy, as the side that was called."""
        peer = self._peers.get(request.from_peer)
        if peer is None or peer.info.incarnation != request.incarnation:
            return pb.ExchangeReply(unknown_sender=True)
        peer.liveness.heard(self._clock())
        self._take(request.push, request.telemetry)
        have = codec.versions_from_proto(request.have)
        return pb.ExchangeReply(
            newer=[codec.record_to_proto(record) for record in self.view.newer_than(have)],
            want=[pb.RecordVersion(**key._asdict()) for key in self.view.wanted_from(have, self._peers)],
            telemetry=[codec.telemetry_to_proto(self._read_telemetry())],
        )

    async def answer_goodbye(self, request: pb.GoodbyeRequest) -> pb.GoodbyeReply:
        """The caller leaves on purpose."""
        peer = self._peers.get(request.peer_id)
        if peer is not None and peer.info.incarnation == request.incarnation:
            self._remove(peer, "said goodbye", logging.INFO)
        return pb.GoodbyeReply()

    # admission

    async def _say_hello(self, address: str) -> bool:
        """Introduce ourselves at an address; True if a peer answers and both sides accept each other."""
        client = ControlClient(address)
        try:
            request = pb.HelloRequest(peer=codec.peer_to_proto(self.own))
            reply = await client.hello(request, self._timing.call_s)
            answered = codec.peer_from_proto(reply.peer)
        except MeshError as exc:
            _log.debug("no hello from %s: %s", address, exc)
            return False
        finally:
            await client.close()
        reason = reply.reason if not reply.accepted else refusal(self.own, answered)
        if reason:
            self._note_refusal(f"{answered.name} at {address}", reason)
            return False
        self._admit(answered, list(dict.fromkeys([address, *answered.addresses])))
        return True

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

    def _note_refusal(self, who: str, reason: str) -> None:
        text = f"{who}: {reason}"
        if reason != ITSELF and text not in self.refusals:
            _log.warning("refused: %s", text)
            self.refusals.append(text)

    def _admit(self, info: PeerInfo, addresses: list[str]) -> None:
        known = self._peers.get(info.id)
        if known is not None:
            if known.info.incarnation >= info.incarnation:
                known.liveness.heard(self._clock())
                return
            self._remove(known, "has restarted")
        if len(self._peers) >= MAX_PEERS or not addresses:
            self._note_refusal(info.name, f"{len(self._peers)} peers are known already, or it has no address")
            return
        liveness = Liveness(self._clock(), self._timing.dead_after_s)
        peer = Peer(info, addresses, ControlClient(addresses[0]), liveness)
        self._peers[info.id] = peer
        _log.info("peer %s (%s) joined from %s", info.name, info.id[:8], addresses[0])
        self._loops[info.id] = self._tasks.start(self._keep_exchanging(peer), f"exchange with {info.id[:8]}")
        self.changed.beat()

    def _remove(self, peer: Peer, why: str, level: int = logging.WARNING) -> None:
        del self._peers[peer.id]
        loop = self._loops.pop(peer.id)
        if loop is not asyncio.current_task():
            loop.cancel()
        self._tasks.start(peer.client.close(), f"close {peer.id[:8]}")
        records = self._records.forget(peer.id)
        _log.log(level, "peer %s (%s) %s", peer.info.name, peer.id[:8], why)
        self._on_leave(peer.info, records)
        self.changed.beat()

    # the exchange

    async def _keep_exchanging(self, peer: Peer) -> None:
        timing = self._timing
        while self._peers.get(peer.id) is peer:  # it is not, once its restart has been noticed here
            try:
                known_there = await self._exchange_with(peer)
                pause_s = timing.exchange_every_s if known_there else 0.0
            except MeshError as exc:
                peer.liveness.probe_failed()
                if peer.liveness.is_dead(self._clock()):
                    self._remove(peer, f"is dead: {exc}")
                    return
                await peer.try_next_address()
                pause_s = timing.retry_s
            self.view.expire(self._clock())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.poke.wait(), max(pause_s, MIN_PAUSE_S))
            peer.poke.clear()

    async def _exchange_with(self, peer: Peer) -> bool:
        """False if the peer had forgotten us and was told again who we are.

        Raises MeshError if it does not answer, or somebody else answers in its place.
        """
        wanted, peer.wanted = peer.wanted, []
        own_id = self.own.id
        push = [key for key in self.view.versions() if key in wanted or key.owner == own_id]
        records = [self.view.get(key) for key in push]
        request = pb.ExchangeRequest(
            from_peer=own_id,
            incarnation=self.own.incarnation,
            have=codec.versions_to_proto(self.view.versions()),
            push=[codec.record_to_proto(record) for record in records if record is not None],
            telemetry=[codec.telemetry_to_proto(self._read_telemetry())],
        )
        sent = self._clock()
        reply = await peer.client.exchange(request, self._timing.call_s)
        if reply.unknown_sender:
            await self._introduce_again(peer)
            return False
        now = self._clock()
        peer.liveness.heard(now)
        peer.rtt_ms = 1000 * (now - sent) if peer.rtt_ms is None else 0.8 * peer.rtt_ms + 200 * (now - sent)
        peer.wanted = list(codec.versions_from_proto(reply.want))
        self._take(reply.newer, reply.telemetry)
        return True

    async def _introduce_again(self, peer: Peer) -> None:
        """The peer has forgotten us: it gave us up for dead, or it has restarted."""
        request = pb.HelloRequest(peer=codec.peer_to_proto(self.own))
        reply = await peer.client.hello(request, self._timing.call_s)
        if not reply.accepted or reply.peer.id != peer.id:
            raise TransportError(f"the node at {peer.client.address} is not {peer.info.name}: {reply.reason}")
        info = codec.peer_from_proto(reply.peer)
        if info.incarnation != peer.info.incarnation:
            self._admit(info, list(peer.addresses))

    def _take(self, records: Iterable[pb.Record], telemetry: Iterable[pb.Telemetry]) -> None:
        changed, strangers = self._records.take(records, self._clock())
        for stranger in strangers:
            for address in stranger.addresses:
                self.suggest(address)
        for record in changed:
            if isinstance(record.value, PeerInfo) and (peer := self._peers.get(record.value.id)):
                peer.info = replace(record.value, incarnation=peer.info.incarnation)
        for reading in telemetry:
            self._records.take_telemetry(codec.telemetry_from_proto(reading))
        if changed:
            self.changed.beat()

    def _announce_change(self) -> None:
        self.changed.beat()
        for peer in self._peers.values():
            peer.poke.set()

    def _incarnation_of(self, peer_id: str) -> int | None:
        peer = self._peers.get(peer_id)
        return None if peer is None else peer.info.incarnation
