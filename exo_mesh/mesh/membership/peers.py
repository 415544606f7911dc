"""The admitted peers, and the addresses and connections by which each is reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec

from exo_mesh.domain.addresses import Path, dialable, joined
from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import MeshError
from exo_mesh.machine.interfaces import recent_interfaces
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.security.secret import fingerprint
from exo_mesh.wire.calls import PROBE_PATH, path_request
from exo_mesh.wire.readings import ShortReadings

MAX_PEERS = 1024
MAX_ADDRESSES = 16
ANSWER_S = 0.8
"""How long a peer may take to answer at another address after it did not answer at one: a LAN needs 3 ms to connect,
Wi-Fi 100 ms, and the peer is declared dead after 3 s."""
ITSELF = "this is the node itself"
VERSIONS_PER_INCARNATION = 2**32
"""A record's version is incarnation * this + a counter, so a record written after a restart replaces all earlier
ones."""

_log = logging.getLogger(__name__)


class Peer(msgspec.Struct):
    """An admitted peer.

    addresses: where it may be reached; `client` uses one of them. paths: the measured paths, by address. retired:
    clients of former addresses, kept while a call or stream runs on them. clock_offset_s: its clock minus this node's
    clock, by its last answer; None before it has sent its time. unanswered_since: when the first of its current
    unanswered probes was sent, None if it answers; other peers may still reach it. sends_sums: its answers to
    probes carry the sums of its records; those of older versions do not. takes_short_readings: a reading sent to it may
    leave out hops. short: the turns of the hops in the readings sent to it.
    """

    info: PeerInfo
    addresses: list[str]
    client: ControlPort
    last_heard: float
    rtt_ms: float | None = None
    paths: dict[str, Path] = msgspec.field(default_factory=dict)
    retired: list[ControlPort] = msgspec.field(default_factory=list)
    clock_offset_s: float | None = None
    unanswered_since: float | None = None
    sends_sums: bool = False
    takes_short_readings: bool = False
    short: ShortReadings = msgspec.field(default_factory=ShortReadings)

    @property
    def id(self) -> str:
        return self.info.id

    def answered(self, began: float, now: float) -> None:
        """Record an answered call: the peer is alive, and this is its round trip."""
        self.last_heard = now
        self.unanswered_since = None
        rtt_ms = 1000 * (now - began)
        self.rtt_ms = rtt_ms if self.rtt_ms is None else 0.8 * self.rtt_ms + 0.2 * rtt_ms

    def told_time(self, theirs: float, ours: float, took_s: float) -> None:
        """Record the peer's clock from an answer that took `took_s` and arrived at `ours` (Unix seconds)."""
        self.clock_offset_s = theirs - (ours - took_s / 2)

    @property
    def host(self) -> str:
        """The host by which this node reaches the peer, without the port."""
        return self.client.address.rpartition(":")[0]

    @property
    def hosts(self) -> list[str]:
        """The hosts by which this node may reach the peer, without ports; the host in use first."""
        others = (address.rpartition(":")[0] for address in self.addresses)
        return list(dict.fromkeys((self.host, *others)))

    @property
    def ips(self) -> set[str]:
        """The hosts by which this node may reach the peer, without brackets and interfaces of IPv6 addresses."""
        return {host.strip("[]").partition("%")[0] for host in self.hosts}

    @property
    def proven_ips(self) -> set[str]:
        """Like `ips`, without the hosts of callers that only claimed to be this peer."""
        advertised = (address.rpartition(":")[0] for address in self.info.addresses)
        return {host.strip("[]").partition("%")[0] for host in (self.host, *advertised)}

    def learn(self, addresses: Iterable[str]) -> None:
        """Add addresses of the peer. Failed addresses are dropped first to make room; the address in use stays."""
        usable = [way for address in addresses for way in dialable(address, recent_interfaces())]
        new = [address for address in dict.fromkeys(usable) if address not in self.addresses]
        room = MAX_ADDRESSES - len(self.addresses) - len(new)
        for address in [address for address in self.addresses if address in self.paths and self.paths[address].failed]:
            if room < 0 and address != self.client.address:
                self.addresses.remove(address)
                room += 1
        self.addresses = [*self.addresses, *new][:MAX_ADDRESSES]

    def use(self, client: ControlPort) -> None:
        """Make calls through this client from now on; calls and streams on the old one continue."""
        self.retired = [old for old in (*self.retired, self.client) if old is not client]
        self.client = client
        self.rtt_ms = None

    async def try_next_address(self) -> bool:
        """After a failed call: try all other addresses at once, and use the address where the peer itself answers
        first. True if one answered."""
        others = [address for address in self.addresses if address != self.client.address]
        found = await first_answer(self.id, [self.client.at(address) for address in others])
        if found is not None:
            _log.info("peer %s (%s): address %s failed, using %s", self.info.name, self.id[:8], self.client.address,
                      found.address)  # fmt: skip
            self.use(found)
            self.paths.clear()  # the network has changed: measure again
        return found is not None

    async def close_retired(self) -> None:
        """Close the retired clients that are no longer used."""
        idle = [client for client in self.retired if client.is_idle]
        self.retired = [client for client in self.retired if not client.is_idle]
        await asyncio.gather(*(client.close() for client in idle))

    async def close_when_idle(self) -> None:
        """Close every connection to the peer once no stage reports over it."""
        clients, self.retired = [self.client, *self.retired], []
        await asyncio.gather(*(client.close_when_idle() for client in clients))

    async def close(self) -> None:
        """Close every connection to the peer; running calls end."""
        clients, self.retired = [self.client, *self.retired], []
        await asyncio.gather(*(client.close() for client in clients))


async def first_answer(peer_id: str, clients: Sequence[ControlPort]) -> ControlPort | None:
    """The client over which the peer itself answers first; None if none answers. Closes the other clients."""
    asked = {asyncio.create_task(is_answered_by(peer_id, client)): client for client in clients}
    found: ControlPort | None = None
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
    """Whether this peer answers within ANSWER_S, and not another node."""
    try:
        return (await client.call(PROBE_PATH, path_request(), ANSWER_S)).peer_id == peer_id
    except MeshError:
        return False


def addresses_of(info: PeerInfo, seen_host: str) -> list[str]:
    """ "host:port" to try, best first: the host that the peer was seen at, with the port that it advertises, then the
    addresses that it advertises."""
    seen = []
    if seen_host and info.addresses:
        seen = [joined(seen_host, info.addresses[0].rpartition(":")[2])]
    return reached_at(info, *seen)


def reached_at(info: PeerInfo, *known: str) -> list[str]:
    """ "host:port" to try, best first: the addresses known to work, then the addresses that the peer advertises."""
    ways = [way for address in (*known, *info.addresses) for way in dialable(address, recent_interfaces())]
    return list(dict.fromkeys(ways))[:MAX_ADDRESSES]


def refusal(own: PeerInfo, other: PeerInfo) -> str:
    """The reason why these two cannot be in one mesh; "" if they can. Both sides reach the same result."""
    if other.namespace != own.namespace:
        return f"namespace {fingerprint(other.namespace)} is not {fingerprint(own.namespace)}"
    if own.protocols.agreed(other.protocols) is None:
        return (
            f"protocol {other.protocols} (exo-mesh {other.version}) has no version in common with {own.protocols} "
            f"(exo-mesh {own.version})"
        )
    if other.id == own.id:
        same_node = other.incarnation == own.incarnation and set(other.addresses) & set(own.addresses)
        return ITSELF if same_node else f"id {own.id[:8]} is already in use by {own.name}"
    return ""
