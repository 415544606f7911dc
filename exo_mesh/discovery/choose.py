"""From settings to discoveries."""

from __future__ import annotations

from exo_mesh.config import Settings
from exo_mesh.discovery.port import Discovery
from exo_mesh.discovery.static import StaticDiscovery
from exo_mesh.discovery.udp import UdpDiscovery
from exo_mesh.security.datagrams import Seal


def is_loopback(host: str) -> bool:
    """Does a node that listens on `host` hear this machine only?"""
    return host in ("localhost", "::1") or host.startswith("127.")


def discoveries_for(settings: Settings) -> list[Discovery]:
    """What `--discovery` and `--bootstrap-peers` ask for; bootstrap peers are dialled with any discovery."""
    chosen: list[Discovery] = []
    if "udp" in settings.discovery:
        loopback_only = is_loopback(settings.host)
        seal = _seal(settings.secret)
        chosen.append(
            UdpDiscovery(settings.listen_port, settings.broadcast_port, loopback_only=loopback_only, seal=seal)
        )
    if settings.bootstrap_peers:
        chosen.append(StaticDiscovery(settings.bootstrap_peers))
    return chosen


def _seal(secret: str) -> Seal | None:
    """What signs announcements; None in an open mesh."""
    if not secret:
        return None
    from exo_mesh.security.keys import announcement_key  # an open mesh does without cryptography, which imports slowly

    return Seal(announcement_key(secret))
