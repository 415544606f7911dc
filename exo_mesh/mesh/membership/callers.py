"""Decides who may call a node's control port, from its live peers and its settings."""

from __future__ import annotations

from exo_mesh.mesh.membership.service import Membership
from exo_mesh.settings.config import Settings
from exo_mesh.wire.call_access import CallGuard, PeerAt


def guard_of(membership: Membership, settings: Settings) -> CallGuard:
    """The guard of a node's control port."""
    return CallGuard(
        is_closed=bool(settings.secret),
        open_admin=settings.open_admin,
        peers=lambda: [PeerAt(peer.id, peer.proven_ips, peer.client) for peer in membership.peers],
    )
