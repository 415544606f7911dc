"""The peers that were admitted, and how each is reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from exo_mesh.discovery.interfaces import recent_interfaces
from exo_mesh.domain.addresses import Path, dialable, joined
from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import MeshError
from exo_mesh.membership.port import ControlPort, PeerClient
from exo_mesh.security.namespace import fingerprint

MAX_PEERS = 1024
MAX_ADDRESSES = 16
ANSWER_S = 0.8
"""How long another address of a peer that does not answer at one is waited for: a LAN needs 3 ms to connect, Wi-Fi 100,
and the peer is dead after 3 s."""
ITSELF = "this is the node itself"
VERSIONS_PER_INCARNATION = 2**32
"""A record's version is incarnation * this + a counter: what an owner writes after a restart beats all from before."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Peer:
    """An admitted peer.

    addresses: where it may be reached; `client` uses one of them. paths: what was measured, by address.
    retired: clients of addresses that were left, kept while a call or stream is under way on them.
    clock_offset_s: its clock minus ours, by its last answer; None until it has told.
    unanswered_since: when a probe was sent that it has not answered, nor any since; others may still reach it.
    """

    info: PeerInfo
    addresses: list[str]
    client: PeerClient
    last_heard: float
    rtt_ms: float | None = None
    paths: dict[str, Path] = field(default_factory=dict)
    retired: list[PeerClient] = field(default_factory=list)
    clock_offset_s: float | None = None
    unanswered_since: float | None = None

    @property
    def id(self) -> str:
        return self.info.id

    def answered(self, began: float, now: float) -> None:
        """A call was answered: a sign of life, and a measurement."""
        self.last_heard = now
        self.unanswered_since = None
        rtt_ms = 1000 * (now - began)
        self.rtt_ms = rtt_ms if self.rtt_ms is None else 0.8 * self.rtt_ms + 0.2 * rtt_ms

    def told_time(self, theirs: float, ours: float, took_s: float) -> None:
        """It said what its clock shows, in an answer that took so long and has come at `ours` (Unix seconds)."""
        self.clock_offset_s = theirs - (ours - took_s / 2)

    @property
    def host(self) -> str:
        """Where this node reaches the peer, without the port."""
        return self.client.address.rpartition(":")[0]

    @property
    def hosts(self) -> list[str]:
        """Where this node may reach the peer, without ports; the one in use first."""
        others = (address.rpartition(":")[0] for address in self.addresses)
        return list(dict.fromkeys((self.host, *others)))

    def learn(self, addresses: Iterable[str]) -> None:
        """The peer may be reached at these too. What failed makes room first; the address in use stays."""
        usable = [way for address in addresses for way in dialable(address, recent_interfaces())]
        new = [address for address in dict.fromkeys(usable) if address not in self.addresses]
        room = MAX_ADDRESSES - len(self.addresses) - len(new)
        for address in [address for address in self.addresses if address in self.paths and self.paths[address].failed]:
            if room < 0 and address != self.client.address:
                self.addresses.remove(address)
                room += 1
        self.addresses = [*self.addresses, *new][:MAX_ADDRESSES]

    def use(self, client: PeerClient) -> None:
        """From now on call this client; what runs over the old one goes on."""
        self.retired = [old for old in (*self.retired, self.client) if old is not client]
        self.client = client
        self.rtt_ms = None

    async def try_next_address(self) -> bool:
        """After a failed call: ask at all other addresses at once, and go on where the peer itself answers first; True
        if it does."""
        others = [address for address in self.addresses if address != self.client.address]
        found = await first_answer(self.id, [self.client.at(address) for address in others])
        if found is not None:
            _log.info("peer %s (%s): %s fails, going on at %s", self.info.name, self.id[:8], self.client.address,
                      found.address)  # fmt: skip
            self.use(found)
            self.paths.clear()  # something has changed: measure again
        return found is not None

    async def close_retired(self) -> None:
        """Close the clients that nothing uses any more."""
        idle = [client for client in self.retired if client.is_idle]
        self.retired = [client for client in self.retired if not client.is_idle]
        await asyncio.gather(*(client.close() for client in idle))

    async def close_when_idle(self) -> None:
        """Close every connection to the peer once no stage reports over it."""
        clients, self.retired = [self.client, *self.retired], []
        await asyncio.gather(*(client.close_when_idle() for client in clients))

    async def close(self) -> None:
        """Close every connection to the peer; calls under way end."""
        clients, self.retired = [self.client, *self.retired], []
        await asyncio.gather(*(client.close() for client in clients))


async def first_answer(peer_id: str, clients: Sequence[PeerClient]) -> PeerClient | None:
    """The client over which the peer itself answers first; None if it answers over none. The others are closed."""
    asked = {asyncio.create_task(is_answered_by(peer_id, client)): client for client in clients}
    found: PeerClient | None = None
    try:
        waiting = set(asked)
        while waiting and found is None:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            found = next((asked[task] for task in done if task.result()), None)
        return found
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients if client is not found))


async def is_answered_by(peer_id: str, client: ControlPort) -> bool:
    """Is it this peer that answers, and soon?"""
    try:
        return (await client.probe_path(0, ANSWER_S)).peer_id == peer_id
    except MeshError:
        return False


def addresses_of(info: PeerInfo, seen_host: str) -> list[str]:
    """ "host:port" to try, best first: the host that the peer was seen at, with the port that it announces."""
    seen = []
    if seen_host and info.addresses:
        seen = [joined(seen_host, info.addresses[0].rpartition(":")[2])]
    return reached_at(info, *seen)


def reached_at(info: PeerInfo, *known: str) -> list[str]:
    """ "host:port" to try, best first: those that are known to work, then what the peer advertises."""
    ways = [way for address in (*known, *info.addresses) for way in dialable(address, recent_interfaces())]
    return list(dict.fromkeys(ways))[:MAX_ADDRESSES]


def refusal(own: PeerInfo, other: PeerInfo) -> str:
    """Why these two cannot be in one mesh; "" if they can. Both sides come to the same verdict."""
    if other.namespace != own.namespace:
        return f"namespace {fingerprint(other.namespace)} is not {fingerprint(own.namespace)}"
    if own.protocols.agreed(other.protocols) is None:
        return (
            f"protocol {other.protocols} (exo-mesh {other.version}) has no version in common with {own.protocols} "
            f"(exo-mesh {own.version})"
        )
    if other.id == own.id:
        same_node = other.incarnation == own.incarnation and set(other.addresses) & set(own.addresses)
        return ITSELF if same_node else f"id {own.id[:8]} is in use by {own.name} already"
    return ""
