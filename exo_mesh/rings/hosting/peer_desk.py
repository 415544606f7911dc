"""Passes an admin's requests for a single peer through any node: drain it, or read its last log records."""

from __future__ import annotations

from typing import Any

import msgspec

from exo_mesh.base.printable import printable_values
from exo_mesh.base.telemetry.log_ring import MAX_CHARS, MAX_RECORDS
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.naming import peer_called
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting import calls

MAX_LOG_BYTES = 2 * MAX_RECORDS * MAX_CHARS
"""Largest answer of a peer."""


class PeerDesk:
    """Drains a peer or reads its log. A peer is named by its id or its name; "" is this node. All methods raise
    MeshErrors."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def drain(self, peer: str, *, on: bool) -> str:
        """Let a peer finish what runs and take nothing new; or take requests again. Returns the peer's id; "" if there
        is no such peer."""
        peer_id = self._found(peer)
        if peer_id:
            await calls.drain(self._membership.calls, peer_id, on=on)
        return peer_id

    async def log(self, peer: str, records: int) -> list[dict[str, Any]] | None:
        """The last log records of a peer, oldest first: objects with time, level, logger and message. None if there is
        no such peer."""
        peer_id = self._found(peer)
        if not peer_id:
            return None
        raw = await calls.read_log(self._membership.calls, peer_id, records)
        if len(raw) > MAX_LOG_BYTES:
            raise TransportError(f"the peer's log has {len(raw)} bytes, more than {MAX_LOG_BYTES}")
        try:
            lines = msgspec.json.decode(raw, type=list[dict[str, Any]])
        except (msgspec.DecodeError, RecursionError) as exc:
            raise TransportError(f"the peer's log is not JSON: {exc}") from exc
        shown: list[dict[str, Any]] = printable_values(lines[-records:])
        return shown

    def _found(self, peer: str) -> str:
        found = peer_called(peer, self._membership.everybody) if peer else self._membership.own
        return found.id if found is not None else ""
