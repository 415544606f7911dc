"""From settings to discoveries."""

from __future__ import annotations

from exo_mesh.config import Settings
from exo_mesh.discovery.port import Discovery
from exo_mesh.discovery.static import StaticDiscovery
from exo_mesh.errors import InputError
from exo_mesh.security.datagrams import Seal

DEFAULT_GRPC_PORT = 5000


def is_loopback(host: str) -> bool:
    """Does a node that listens on `host` hear this machine only?"""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def discoveries_for(settings: Settings) -> list[Discovery]:
    """What `--discovery`, `--peers-file` and `--bootstrap-peers` ask for; named peers are dialled with any discovery.

    Raises InputError if a file that was named cannot be used, or a way of discovery lacks what it needs.
    """
    chosen: list[Discovery] = []
    loopback_only = is_loopback(settings.host)
    port = settings.grpc_port or DEFAULT_GRPC_PORT
    if "manual" in settings.discovery and settings.peers_file is None and not settings.bootstrap_peers:
        raise InputError("--discovery manual needs --peers-file or --bootstrap-peers", param="peers_file")
    if "udp" in settings.discovery:
        from exo_mesh.discovery.udp import UdpDiscovery

        ports = settings.listen_port, settings.broadcast_port
        seal = _seal(settings.secret)
        chosen.append(UdpDiscovery(*ports, loopback_only=loopback_only, host=settings.host, seal=seal))
    if "mdns" in settings.discovery:
        from exo_mesh.discovery.mdns import MdnsDiscovery

        chosen.append(MdnsDiscovery(host=settings.host, loopback_only=loopback_only))
    if "tailscale" in settings.discovery:
        chosen.append(_tailscale(settings, port))
    if settings.peers_file is not None:
        from exo_mesh.discovery.peers_file import PeersFileDiscovery

        chosen.append(PeersFileDiscovery(settings.peers_file, port))
    if settings.bootstrap_peers:
        chosen.append(StaticDiscovery(settings.bootstrap_peers))
    return chosen


def _seal(secret: str) -> Seal | None:
    """What signs announcements; None in an open mesh."""
    if not secret:
        return None
    from exo_mesh.security.keys import announcement_key  # an open mesh does without cryptography, which imports slowly

    return Seal(announcement_key(secret))


def _tailscale(settings: Settings, port: int) -> Discovery:
    from exo_mesh.discovery.tailscale import TailscaleDiscovery, read_key

    if settings.tailscale_api_key_file is None:
        raise InputError("--discovery tailscale needs --tailscale-api-key-file", param="tailscale_api_key_file")
    key = read_key(settings.tailscale_api_key_file)
    return TailscaleDiscovery(key, settings.tailnet, port, api_url=settings.tailscale_api_url)
