"""From settings to discoveries."""

from __future__ import annotations

from exo_mesh.config import Settings
from exo_mesh.discovery.port import Discovery
from exo_mesh.discovery.static import StaticDiscovery
from exo_mesh.discovery.udp import UdpDiscovery


def is_loopback(host: str) -> bool:
    """Does a node that listens on `host` hear this machine only?"""
    return host in ("localhost", "::1") or host.startswith("127.")


def discoveries_for(settings: Settings) -> list[Discovery]:
    """What `--discovery` and `--bootstrap-peers` ask for; bootstrap peers are dialled with any discovery."""
    chosen: list[Discovery] = []
    if "udp" in settings.discovery:
        loopback_only = is_loopback(settings.host)
        chosen.append(UdpDiscovery(settings.listen_port, settings.broadcast_port, loopback_only=loopback_only))
    if settings.bootstrap_peers:
        chosen.append(StaticDiscovery(settings.bootstrap_peers))
    return chosen
