"""Chooses and configures the discoveries that the settings ask for."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from exo_mesh.errors import InputError
from exo_mesh.mesh.discovery.port import Discovery
from exo_mesh.mesh.discovery.static import StaticDiscovery
from exo_mesh.security.datagrams import Seal
from exo_mesh.settings.config import Settings

DEFAULT_GRPC_PORT = 5000


def is_loopback(host: str) -> bool:
    """Whether a node that listens on `host` can be reached only from this machine."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def why_not_announced(host: str) -> str:
    """The reason why UDP announcements cannot announce a node that listens on `host`; "" if they can.

    The receiver dials the address that an announcement came from, which is an IPv4 address or an IPv6 link-local one.
    Announcements on the loopback carry the address itself.
    """
    ip = _ip(host)
    if ip is None:
        return "" if host == "localhost" else "a host name"
    return "" if ip.version == 4 or ip.is_link_local or ip.is_loopback or ip.is_unspecified else "a routed IPv6 address"


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        return None


def discoveries_for(settings: Settings) -> list[Discovery]:
    """The discoveries of `--discovery`, `--peers-file` and `--bootstrap-peers`; the last two work with any discovery.

    Raises InputError if a named file cannot be used, or a discovery lacks a required setting.
    """
    chosen: list[Discovery] = []
    loopback_only = is_loopback(settings.host)
    port = settings.grpc_port or DEFAULT_GRPC_PORT
    if "manual" in settings.discovery and settings.peers_file is None and not settings.bootstrap_peers:
        raise InputError("--discovery manual needs --peers-file or --bootstrap-peers", param="peers_file")
    reason = why_not_announced(settings.host)
    if reason and settings.discovery == ("udp",) and not (settings.peers_file or settings.bootstrap_peers):
        raise InputError(
            f"--discovery udp alone cannot announce --host {settings.host} ({reason}): listen on an IPv4 address or "
            "on ::, add mdns, or name peers with --bootstrap-peers",
            param="host",
        )
    if "udp" in settings.discovery:
        from exo_mesh.mesh.discovery.udp import UdpDiscovery

        ports = settings.listen_port, settings.broadcast_port
        seal = _seal(settings.secret)
        chosen.append(UdpDiscovery(*ports, loopback_only=loopback_only, host=settings.host, seal=seal))
    if "mdns" in settings.discovery:
        from exo_mesh.mesh.discovery.mdns import MdnsDiscovery

        chosen.append(MdnsDiscovery(host=settings.host, loopback_only=loopback_only))
    if "tailscale" in settings.discovery:
        chosen.append(_tailscale(settings, port))
    if settings.peers_file is not None:
        from exo_mesh.mesh.discovery.peers_file import PeersFileDiscovery

        chosen.append(PeersFileDiscovery(settings.peers_file, port))
    if settings.bootstrap_peers:
        chosen.append(StaticDiscovery(settings.bootstrap_peers))
    return chosen


def _seal(secret: str) -> Seal | None:
    """The key that signs announcements; None in an open mesh."""
    if not secret:
        return None
    from exo_mesh.security.keys import announcement_key  # an open mesh avoids this slow import

    return Seal(announcement_key(secret))


def _tailscale(settings: Settings, port: int) -> Discovery:
    from exo_mesh.mesh.discovery.tailscale import TailscaleDiscovery, read_key

    if settings.tailscale_api_key_file is None:
        raise InputError("--discovery tailscale needs --tailscale-api-key-file", param="tailscale_api_key_file")
    key = read_key(settings.tailscale_api_key_file)
    return TailscaleDiscovery(key, settings.tailnet, port, api_url=settings.tailscale_api_url)
