"""Passes an admin's requests for a single peer through any node: drain it, stop it, wake it, or read its log."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from exo_mesh.base.printable import printable_values
from exo_mesh.base.telemetry.log_ring import MAX_CHARS, MAX_RECORDS, RECENT
from exo_mesh.domain.bounded_json import decode_bounded
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.guard import Guard
from exo_mesh.rings.hosting.stage_host import StageHost

MAX_LOG_BYTES = 2 * MAX_RECORDS * MAX_CHARS
"""Largest answer of a peer."""

_log = logging.getLogger(__name__)


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
        self._host.draining = on
        self._membership.tell_reading()
        _log.info("draining: this node takes no new requests" if on else "this node takes requests again")

    async def drain(self, peer: str, *, on: bool) -> str:
        """As drain_here, at any peer. Returns the peer's id."""
        named = self._membership.peer_named(peer)
        if (found := self._membership.peer(named.id)) is None:
            self.drain_here(on=on)
        else:
            await found.client.drain(found.id, on=on)
        return named.id

    async def log(self, peer: str, records: int) -> list[dict[str, Any]]:
        """The last log records of a peer, oldest first: objects with time, level, logger and message."""
        found = self._membership.peer(self._membership.peer_named(peer).id)
        raw = self.log_here(records) if found is None else await found.client.read_log(records)
        if len(raw) > MAX_LOG_BYTES:
            raise TransportError(f"the peer's log has {len(raw)} bytes, more than {MAX_LOG_BYTES}")
        try:
            lines = decode_bounded(raw, list[dict[str, Any]])
        except (msgspec.DecodeError, RecursionError) as exc:
            raise TransportError(f"the peer's log is not JSON: {exc}") from exc
        shown: list[dict[str, Any]] = printable_values(lines[-records:])
        return shown

    def log_here(self, records: int) -> bytes:
        """This node's last log records as JSON, for its callers and its peers."""
        return msgspec.json.encode([line.describe() for line in RECENT.last(min(records, MAX_RECORDS))])
