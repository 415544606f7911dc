"""The peers that were admitted, and how each is reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exo_mesh.domain.device import PeerInfo
from exo_mesh.transport.control_client import ControlClient

MAX_PEERS = 1024
MAX_ADDRESSES = 16
ITSELF = "this is the node itself"
VERSIONS_PER_INCARNATION = 2**32
"""A record's version is incarnation * this + a counter: what an owner writes after a restart beats all from before."""


@dataclass(slots=True)
class Peer:
    """An admitted peer. `addresses` are tried in turn when calls fail; the first is the one that worked last."""

    info: PeerInfo
    addresses: list[str]
    client: ControlClient
    connect: Callable[[str], ControlClient]
    last_heard: float
    rtt_ms: float | None = None

    @property
    def id(self) -> str:
        return self.info.id

    def answered(self, began: float, now: float) -> None:
        """A call was answered: a sign of life, and a measurement."""
        self.last_heard = now
        rtt_ms = 1000 * (now - began)
        self.rtt_ms = rtt_ms if self.rtt_ms is None else 0.8 * self.rtt_ms + 0.2 * rtt_ms

    @property
    def host(self) -> str:
        """Where this node reaches the peer, without the port."""
        return self.client.address.rpartition(":")[0]

    async def try_next_address(self) -> None:
        """After a failed call: dial the next address, if there is more than one."""
        if len(self.addresses) > 1:
            self.addresses.append(self.addresses.pop(0))
            old, self.client = self.client, self.connect(self.addresses[0])
            await old.close_when_idle()


def addresses_of(info: PeerInfo, seen_host: str) -> list[str]:
    """ "host:port" to try, best first: the host that the peer was seen at, with the port that it announces."""
    seen = []
    if seen_host and info.addresses:
        host = f"[{seen_host}]" if ":" in seen_host and not seen_host.startswith("[") else seen_host
        seen = [f"{host}:{info.addresses[0].rpartition(':')[2]}"]
    return list(dict.fromkeys([*seen, *info.addresses]))[:MAX_ADDRESSES]


def refusal(own: PeerInfo, other: PeerInfo) -> str:
    """Why these two cannot be in one mesh; "" if they can. Both sides come to the same verdict."""
    if other.namespace != own.namespace:
        return f"namespace {other.namespace!r} is not {own.namespace!r}"
    if other.protocol != own.protocol:
        return f"protocol {other.protocol} (exo-mesh {other.version}) is not {own.protocol} (exo-mesh {own.version})"
    if other.id == own.id:
        same_node = other.incarnation == own.incarnation and set(other.addresses) & set(own.addresses)
        return ITSELF if same_node else f"id {own.id[:8]} is in use by {own.name} already"
    return ""
