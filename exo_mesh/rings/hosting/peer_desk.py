"""Passes an admin's requests for a single peer through any node: drain it, or read its last log records."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from exo_mesh.base.printable import printable_values
from exo_mesh.base.telemetry.log_ring import MAX_CHARS, MAX_RECORDS, RECENT
from exo_mesh.domain.bounded_json import decode_bounded
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.naming import peer_called
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.stage_host import StageHost

MAX_LOG_BYTES = 2 * MAX_RECORDS * MAX_CHARS
"""Largest answer of a peer."""

_log = logging.getLogger(__name__)


class PeerDesk:
    """Drains a peer or reads its log. A peer is named by its id or its name; "" is this node. All methods raise
    MeshErrors."""

    def __init__(self, membership: Membership, host: StageHost) -> None:
        self._membership = membership
        self._host = host

    def drain_here(self, *, on: bool) -> None:
        """Finish what runs and take nothing new; or take requests again."""
        self._host.draining = on
        self._membership.tell_reading()
        _log.info("draining: this node takes no new requests" if on else "this node takes requests again")

    async def drain(self, peer: str, *, on: bool) -> str:
        """As drain_here, at any peer. Returns the peer's id; "" if there is no such peer."""
        if self._is_own(peer):
            self.drain_here(on=on)
            return self._membership.own.id
        if (found := self._find(peer)) is None:
            return ""
        await found.client.drain(found.id, on=on)
        return found.id

    async def log(self, peer: str, records: int) -> list[dict[str, Any]] | None:
        """The last log records of a peer, oldest first: objects with time, level, logger and message. None if there is
        no such peer."""
        if self._is_own(peer):
            raw = self.log_here(records)
        elif (found := self._find(peer)) is not None:
            raw = await found.client.read_log(records)
        else:
            return None
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

    def _is_own(self, peer: str) -> bool:
        return not peer or self._found(peer) == self._membership.own.id

    def _find(self, peer: str) -> Peer | None:
        return self._membership.peer(self._found(peer))

    def _found(self, peer: str) -> str:
        found = peer_called(peer, self._membership.everybody)
        return found.id if found is not None else ""
