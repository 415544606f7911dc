"""The port that every discovery implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

Suggest = Callable[[str], None]
"""Takes the "host:port" of a possible control endpoint. Cheap, never fails, and may get the same address often."""


class Announcement(msgspec.Struct, frozen=True):
    """A node's announcement, by which others can dial it; the address is the sender's.

    name and protocol are for display only; the hello decides whether two nodes fit together. host: the loopback address
    that the control port is bound to, if it differs from the address that the announcement comes from.
    """

    namespace: str
    node_id: str
    control_port: int
    name: str = ""
    protocol: int = 0
    host: str = ""


class Discovery(Protocol):
    """Suggests addresses from `start` until `stop` returns. Finding no peer is no error."""

    name: str

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        """Start. Raises TransportError with the reason if this discovery cannot work on this machine."""

    async def stop(self) -> None:
        """Stop. Afterwards no socket or task of this discovery is left, and `suggest` is not called again."""
