"""Passes an admin's requests for a single peer through any node: drain it, stop it, wake it, or read its log."""

from __future__ import annotations

from typing import Any

import msgspec

from exo_mesh.base.printable import printable_values
from exo_mesh.base.telemetry.log_ring import MAX_CHARS, MAX_RECORDS
from exo_mesh.domain.bounded_json import decode_bounded
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting import calls
from exo_mesh.rings.hosting.guard import Guard
from exo_mesh.rings.hosting.stage_host import StageHost

MAX_LOG_BYTES = 2 * MAX_RECORDS * MAX_CHARS
"""Largest answer of a peer."""


class PeerService:
    """Drains a peer or reads its log. stops: stops and restarts nodes. sleeps: reports that this machine sleeps, and
    wakes peers. peer: see Membership.peer_named. All methods raise MeshErrors."""

    def __init__(self, membership: Membership, host: StageHost, guard: Guard) -> None:
        self._membership = membership
        self._host = host
        self._guard = guard
        self.stops = membership.stops
        self.sleeps = membership.sleeps

    def lift_quarantine(self) -> int:
        """Ends the quarantine of models and engines that failed here repeatedly; returns how many there were."""
        return self._guard.lift()

    def drain_here(self, *, on: bool) -> None:
        """Finish what runs and take nothing new; or take requests again."""
        calls.drain_here(self._host, self._membership, on=on)

    async def drain(self, peer: str, *, on: bool) -> str:
        """As drain_here, at any peer. Returns the peer's id."""
        peer_id = self._membership.peer_named(peer).id
        await calls.drain(self._membership.calls, peer_id, on=on)
        return peer_id

    async def log(self, peer: str, records: int) -> list[dict[str, Any]]:
        """The last log records of a peer, oldest first: objects with time, level, logger and message."""
        peer_id = self._membership.peer_named(peer).id
        raw = await calls.read_log(self._membership.calls, peer_id, records)
        if len(raw) > MAX_LOG_BYTES:
            raise TransportError(f"the peer's log has {len(raw)} bytes, more than {MAX_LOG_BYTES}")
        try:
            lines = decode_bounded(raw, list[dict[str, Any]])
        except (msgspec.DecodeError, RecursionError) as exc:
            raise TransportError(f"the peer's log is not JSON: {exc}") from exc
        shown: list[dict[str, Any]] = printable_values(lines[-records:])
        return shown
