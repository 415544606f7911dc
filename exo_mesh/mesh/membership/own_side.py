"""What the membership asks of the node that it belongs to, and tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.view import Record


class OwnSide(Protocol):
    """A node, as its membership sees it."""

    def reading(self) -> Telemetry:
        """The figures of this machine now."""

    def prefixes(self) -> Mapping[str, bytes]:
        """Digests of what this node's drivers keep, by instance."""

    def is_calm(self, instance_id: str) -> bool:
        """Whether no request uses a ring, as far as this node knows: then its members are probed by datagrams."""

    def peer_left(self, peer: PeerInfo, records: list[Record]) -> None:
        """A peer has died or left. records: its records that were in force."""

    async def before_refute(self) -> None:
        """The other peers consider this node dead, because it was suspended or disconnected: with the view up to date,
        and before the refutation, it frees what the others have given to other peers meanwhile."""
