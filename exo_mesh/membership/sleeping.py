"""Machines that sleep: this one tells the mesh before it does, and any member wakes another by Wake-on-LAN."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from exo_mesh.discovery.interfaces import recent_interfaces
from exo_mesh.discovery.wake_on_lan import PORT, send_magic_packets, shared_networks
from exo_mesh.domain.addresses import valid_macs
from exo_mesh.errors import InputError
from exo_mesh.membership.known_peers import FILE_NAME, MAX_KNOWN_ADDRESSES, KnownPeer, write_private
from exo_mesh.membership.roster import Roster
from exo_mesh.proto import control_pb2 as pb

GOODBYE_S = 0.5
WAKE_S = 2.0
MAX_HELPING = 16
"""Peers that are asked to send the packet, too."""

LOOK_EVERY_S = 0.5
SLEPT_S = 3.0
"""The wall clock has gone so much further than the clock that stands still in sleep: the machine has slept."""

STAYED_AWAKE_S = 60.0
"""A machine that has not gone to sleep by then does not go at all, so its node comes back."""

WRITE_EVERY_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WakeCall:
    """senders: names of the nodes that have sent packets. is_here: the peer lives, so none was sent."""

    peer: KnownPeer
    senders: tuple[str, ...] = ()
    is_here: bool = False


class SleepDesk:
    """port: that of the packets."""

    def __init__(self, roster: Roster, port: int = PORT) -> None:
        self._roster = roster
        self._port = port
        self._watching = False

    # this machine

    async def sleep(self) -> int:
        """This machine is about to sleep: say so to all peers, and keep silent until it has woken. How many heard."""
        roster = self._roster
        roster.is_asleep = True
        clock, wall = roster.clock(), roster.wall_clock()
        goodbye = pb.GoodbyeRequest(peer_id=roster.own.id, incarnation=roster.own.incarnation, asleep=True)
        calls = (peer.client.goodbye(goodbye, GOODBYE_S) for peer in list(roster.peers.values()))
        told = [answer is None for answer in await asyncio.gather(*calls, return_exceptions=True)]
        _log.info("this machine goes to sleep; %d of %d peers know", sum(told), len(told))
        if not self._watching:
            self._watching = True
            roster.tasks.start(self._watch_for_waking(clock, wall), "waking up")
        return sum(told)

    def awake(self) -> None:
        """The machine has woken, or does not sleep after all: come back into the mesh."""
        if self._roster.is_asleep:
            _log.info("this machine is awake again")
            self._roster.is_asleep = False
            self._roster.poke.beat()

    async def _watch_for_waking(self, clock: float, wall: float) -> None:
        """clock, wall: what both clocks showed when the machine was said to sleep."""
        roster = self._roster
        try:
            while roster.is_asleep:
                await asyncio.sleep(LOOK_EVERY_S)
                ran_s, passed_s = roster.clock() - clock, roster.wall_clock() - wall
                if passed_s - ran_s > SLEPT_S or ran_s > STAYED_AWAKE_S:
                    self.awake()
        finally:
            self._watching = False

    # others

    async def wake(self, wanted: str) -> WakeCall | None:
        """Send magic packets to a peer, by name or id, from here and from peers; None if it was never met. Raises
        InputError if it cannot be woken."""
        roster = self._roster
        peer = roster.known.find(wanted)
        if peer is None:
            return None
        if peer.id in roster.peers or peer.id == roster.own.id:
            return WakeCall(peer, is_here=True)
        if not peer.macs:
            raise InputError(f"{peer.name} never told a MAC address, so nothing can wake it over the network")
        request = pb.WakeRequest(peer_id=peer.id, macs=peer.macs, addresses=peer.addresses)
        senders = [roster.own.name] if self.answer_wake(request).num_networks else []
        helpers = list(roster.peers.values())[:MAX_HELPING]
        answers = await asyncio.gather(*(one.client.wake(request, WAKE_S) for one in helpers), return_exceptions=True)
        senders += [one.info.name for one, sent in zip(helpers, answers, strict=True) if isinstance(sent, int) and sent]
        if not senders:
            raise InputError(
                f"no live peer is in a network of {peer.name} ({', '.join(peer.addresses) or 'no address'}): "
                "Wake-on-LAN works within one LAN only"
            )
        return WakeCall(peer, tuple(senders))

    def answer_wake(self, request: pb.WakeRequest) -> pb.WakeReply:
        """A peer asks to wake another machine: send the packets if this machine is in a network of it."""
        networks = shared_networks(request.addresses[:MAX_KNOWN_ADDRESSES], recent_interfaces())
        sent = send_magic_packets(valid_macs(request.macs), networks, self._port)
        if sent:
            _log.info("sent magic packets for peer %s in %d networks", request.peer_id[:8], sent)
        return pb.WakeReply(num_networks=sent)

    @property
    def asleep(self) -> list[tuple[KnownPeer, float]]:
        """Peers that are asleep as far as is known, and for how many seconds."""
        now, peers = self._roster.wall_clock(), self._roster.peers
        return [(one, max(0.0, now - one.asleep_at)) for one in self._roster.known.asleep if one.id not in peers]

    async def keep(self, home: Path) -> None:
        """Until cancelled, keep the peers that can be woken in a file of the node's home."""
        known, path = self._roster.known, home / FILE_NAME
        await asyncio.to_thread(known.read, path)
        for peer in self._roster.peers.values():
            known.met(peer.info)
        written = -1
        while True:
            if known.version != written and not known.is_empty:
                written, text = known.version, known.text()
                try:
                    await asyncio.to_thread(write_private, path, text)
                except OSError as exc:
                    _log.warning("%s: cannot be written: %s", path, exc.strerror or exc)
            await asyncio.sleep(WRITE_EVERY_S)
