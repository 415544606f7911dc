"""Announces that this machine goes to sleep, and wakes other machines by Wake-on-LAN through any member."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from exo_mesh.base.printable import counted
from exo_mesh.errors import InputError, OpenMeshError
from exo_mesh.machine.interfaces import recent_interfaces
from exo_mesh.machine.wake_on_lan import PORT, send_magic_packets, shared_networks
from exo_mesh.mesh.membership.calls import goodbye, wake
from exo_mesh.mesh.membership.known_peers import FILE_NAME, KnownPeer, write_private
from exo_mesh.mesh.membership.port import Calls, raise_bugs
from exo_mesh.mesh.membership.roster import Roster

MAX_HELPING = 16
"""Most peers that are asked to send the packet too."""

LOOK_EVERY_S = 0.5
SLEPT_S = 3.0
"""The machine has slept if the wall clock advanced by this much more than the clock that stops during sleep."""

STAYED_AWAKE_S = 60.0
"""A machine that has not gone to sleep within this time will not sleep, so its node returns to the mesh."""

WRITE_EVERY_S = 5.0

_log = logging.getLogger(__name__)


class WakeCall(msgspec.Struct, frozen=True):
    """Result of waking a peer. senders: names of the nodes that sent packets. is_here: the peer is alive, so no packet
    was sent."""

    peer: KnownPeer
    senders: tuple[str, ...] = ()
    is_here: bool = False


class SleepDesk:
    """Handles sleep announcements and wake requests. port: UDP port of the magic packets."""

    def __init__(self, roster: Roster, calls: Calls, port: int = PORT) -> None:
        self._roster = roster
        self._calls = calls
        self._port = port
        self._watching = False

    # Sleep of this machine.

    async def sleep(self) -> int:
        """Announce to all peers that this machine is about to sleep, and send nothing until it has woken. Returns the
        number of peers that acknowledged."""
        roster = self._roster
        roster.is_asleep = True
        clock, wall = roster.clock(), roster.wall_clock()
        goodbyes = (goodbye(peer.client, roster.own, asleep=True) for peer in list(roster.peers.values()))
        acknowledged = [answer is None for answer in await asyncio.gather(*goodbyes, return_exceptions=True)]
        _log.info(
            "this machine is going to sleep; %d of %s acknowledged",
            sum(acknowledged),
            counted(len(acknowledged), "peer"),
        )
        if not self._watching:
            self._watching = True
            roster.tasks.start(self._watch_for_waking(clock, wall), "waking up")
        return sum(acknowledged)

    def awake(self) -> None:
        """Return to the mesh after the machine has woken, or because it does not sleep after all."""
        if self._roster.is_asleep:
            _log.info("this machine is awake again")
            self._roster.is_asleep = False
            self._roster.poke.beat()

    async def _watch_for_waking(self, clock: float, wall: float) -> None:
        """Wait until the machine has woken. clock, wall: both clocks when sleep was announced."""
        roster = self._roster
        try:
            while roster.is_asleep:
                await asyncio.sleep(LOOK_EVERY_S)
                ran_s, passed_s = roster.clock() - clock, roster.wall_clock() - wall
                if passed_s - ran_s > SLEPT_S or ran_s > STAYED_AWAKE_S:
                    self.awake()
        finally:
            self._watching = False

    # Sleep of other machines.

    async def wake(self, wanted: str) -> WakeCall:
        """Send magic packets to a peer that was connected before, from this node and from other peers. Raises as
        peer_named, and InputError if it cannot be woken."""
        roster = self._roster
        peer = roster.known.named(wanted, roster.own)
        if peer.id in roster.peers or peer.id == roster.own.id:
            return WakeCall(peer, is_here=True)
        if not peer.macs:
            raise InputError(f"{peer.name} never reported a MAC address, so it cannot be woken over the network")
        senders = [roster.own, *(one.info for one in list(roster.peers.values())[:MAX_HELPING])]
        answers = await asyncio.gather(
            *(wake(self._calls, one.id, peer.id, peer.macs, peer.addresses) for one in senders), return_exceptions=True
        )
        raise_bugs(answers)
        names = [one.name for one, sent in zip(senders, answers, strict=True) if isinstance(sent, int) and sent]
        if not names:
            if refusal := next((one for one in answers if isinstance(one, OpenMeshError)), None):
                raise refusal
            raise InputError(
                f"no live peer shares a network with {peer.name} ({', '.join(peer.addresses) or 'no address'}): "
                "Wake-on-LAN works within one LAN only"
            )
        return WakeCall(peer, tuple(names))

    def send_packets(self, peer_id: str, macs: Sequence[str], addresses: Sequence[str]) -> int:
        """Send magic packets for another machine in each network that this machine shares with it. Returns the number
        of networks."""
        sent = send_magic_packets(macs, shared_networks(addresses, recent_interfaces()), self._port)
        if sent:
            _log.info("sent magic packets for peer %s in %d networks", peer_id[:8], sent)
        return sent

    @property
    def asleep(self) -> list[tuple[KnownPeer, float]]:
        """Peers that announced sleep and have not returned, each with the seconds since then."""
        now, peers = self._roster.wall_clock(), self._roster.peers
        return [(one, max(0.0, now - one.asleep_at)) for one in self._roster.known.asleep if one.id not in peers]

    async def keep(self, home: Path) -> None:
        """Until cancelled: save the peers that can be woken in a file in the node's home."""
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
                    _log.warning("cannot write %s: %s", path, exc.strerror or exc)
            await asyncio.sleep(WRITE_EVERY_S)
