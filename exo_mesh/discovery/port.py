"""The port that every discovery implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

Suggest = Callable[[str], None]
"""Takes "host:port" of what may be a control endpoint. Cheap, never fails, may be told the same thing often."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a node tells others of itself so that they can dial it; the address is where the announcement came from.

    name and protocol are for people who look; whether two nodes fit together is decided by their hello. host: an
    address of the loopback that the control port is bound to, where that is not the one the announcement comes from.
    """

    namespace: str
    node_id: str
    control_port: int
    name: str = ""
    protocol: int = 0
    host: str = ""


class Discovery(Protocol):
    """Suggests addresses from `start` until `stop` returns. Finding nobody is no error."""

    name: str

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that a bug has ended; see TaskOwner."""

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        """Begin. Raises TransportError if this discovery cannot work on this machine, saying why."""

    async def stop(self) -> None:
        """End; afterwards no socket or task of this discovery is left and `suggest` is not called any more."""
