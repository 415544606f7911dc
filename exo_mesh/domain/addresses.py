"""Chooses which addresses a node advertises, which addresses of a peer it can dial, and which path is best. Pure.

An address is "host:port" with IPv6 in brackets; a link-local one may carry the interface: "[fe80::1%eth0]:5000". The
base path of a server's URL is found here, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_interface, ip_network

import msgspec

MAX_ADVERTISED = 12
"""Most addresses that a node advertises for itself; a laptop with a VPN and Docker has five to eight."""
MAX_V6_PER_INTERFACE = 2
"""IPv6 privacy extensions add many addresses to one interface; all of them lead to the same place."""
MAX_SCOPES = 4
"""Most interfaces on which a link-local IPv6 address without a scope is tried."""
MAX_PROBE_BYTES = 256 * 1024
"""Longest reply to one path probe: enough to tell a slow link from a fast one; 2 ms on gigabit Ethernet."""

WILDCARDS = ("0.0.0.0", "::", "[::]")

_OVERLAYS = (ip_network("100.64.0.0/10"), ip_network("fd7a:115c:a1e0::/48"))
"""Tailscale: the shared address space of RFC 6598, and its own unique local prefix."""


class LinkKind(IntEnum):
    """The kind of link that carries an address, best first."""

    THUNDERBOLT = 0
    ETHERNET = 1
    WIFI = 2
    UNKNOWN = 3
    BRIDGE = 4
    VPN = 5
    LOOPBACK = 6

    @property
    def comes_last(self) -> bool:
        """Whether the link is used only if nothing else works: container bridges, VPNs and the loopback."""
        return self >= LinkKind.BRIDGE


LINK_WORDS = {
    "thunderbolt": LinkKind.THUNDERBOLT,
    "ethernet": LinkKind.ETHERNET,
    "wifi": LinkKind.WIFI,
    "other": LinkKind.UNKNOWN,
    "bridge": LinkKind.BRIDGE,
    "vpn": LinkKind.VPN,
    "loopback": LinkKind.LOOPBACK,
}
"""The names of the link kinds in settings and in output."""


class Interface(msgspec.Struct, frozen=True):
    """One address (without scope) of one network interface that is up."""

    name: str
    address: str
    prefix_len: int
    kind: LinkKind
    index: int = 0

    @property
    def ip(self) -> IPv4Address | IPv6Address:
        return ip_address(self.address)

    @property
    def network(self) -> IPv4Network | IPv6Network:
        return ip_interface(f"{self.address}/{self.prefix_len}").network

    @property
    def broadcast(self) -> str | None:
        """The directed broadcast address; None if the network has none (IPv6, point to point, loopback)."""
        network = self.network
        if network.version == 6 or network.prefixlen >= 31 or self.kind is LinkKind.LOOPBACK:
            return None
        return str(network.broadcast_address)


def kind_of_interface(name: str, system: str, *, wireless: bool = False, bridge: bool = False) -> LinkKind | None:
    """Derives the kind of a network interface from its name; None if peers cannot be reached over it.

    system: as platform.system(). wireless, bridge: what the kernel says about the interface, where it says so.
    """
    word = name.lower()
    if word.startswith(("awdl", "llw", "anpi", "ap1", "gif", "stf", "sit", "p2p")):  # AirDrop, service links, 6to4
        return None
    if word == "lo" or (word.startswith("lo") and word[2:].isdigit()) or "loopback" in word:
        return LinkKind.LOOPBACK
    if word.startswith(("utun", "tun", "tap", "wg", "tailscale", "zt", "ppp", "ipsec", "nebula")):
        return LinkKind.VPN
    if word.startswith("thunderbolt") or (system == "Darwin" and word == "bridge0"):
        return LinkKind.THUNDERBOLT  # macOS names the bridge over its Thunderbolt ports bridge0
    if bridge or word.startswith(("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "lxc", "lxd", "cni", "bridge")):
        return LinkKind.BRIDGE
    if word.startswith(("flannel", "cali", "podman", "vethernet")):
        return LinkKind.BRIDGE
    if wireless or word.startswith(("wl", "wifi", "wi-fi")):
        return LinkKind.WIFI
    return LinkKind.ETHERNET if word.startswith(("en", "eth", "em", "bond", "br")) else LinkKind.UNKNOWN


def split(address: str) -> tuple[str, str]:
    """Splits an address into (host without brackets, port)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def joined(host: str, port: int | str) -> str:
    """Returns "host:port", with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def advertised(host: str, port: int, interfaces: Iterable[Interface]) -> tuple[str, ...]:
    """Returns the addresses under which peers can reach a server bound to host:port, best first.

    A host that is not a wildcard is returned alone; a wildcard stands for every usable address of the machine. Bridges
    and VPNs come last, link-local addresses after routable ones. The loopback is returned only if there is nothing
    else.
    """
    if host not in WILDCARDS:
        return (joined(host, port),)
    usable = [item for item in interfaces if item.kind is not LinkKind.LOOPBACK and not item.ip.is_loopback]
    usable.sort(key=lambda item: (item.kind.comes_last, item.ip.is_link_local, item.kind, item.ip.version, item.name))
    found: list[str] = []
    sixes: dict[tuple[str, bool], int] = {}
    for item in usable:
        group = (item.name, item.ip.is_link_local)
        if item.ip.version == 6:
            sixes[group] = sixes.get(group, 0) + 1
            if sixes[group] > MAX_V6_PER_INTERFACE or (item.ip.is_link_local and item.kind.comes_last):
                continue
        found.append(joined(item.address, port))
    return tuple(dict.fromkeys(found))[:MAX_ADVERTISED] or (joined("127.0.0.1", port),)


def dialable(address: str, interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """Translates an address that a peer advertises into addresses that this machine can dial; empty if it cannot.

    A link-local address is valid only on an interface that has link-local addresses itself. For IPv6 there is one
    dialable address per such interface (only one if the address names an interface), for IPv4 (169.254/16) the address
    itself.
    """
    host, port = split(address)
    ip = _ip(host)
    if ip is None or not ip.is_link_local:
        return (address,)
    matching = [item for item in interfaces if item.ip.is_link_local and item.ip.version == ip.version]
    if isinstance(ip, IPv4Address):
        return (address,) if matching else ()
    scope = ip.scope_id
    if scope is not None:
        name = next((item.name for item in matching if scope in (item.name, str(item.index))), None)
        return () if name is None else (f"[{host.partition('%')[0]}%{name}]:{port}",)
    names = dict.fromkeys(item.name for item in matching if not item.kind.comes_last)
    return tuple(f"[{host}%{name}]:{port}" for name in list(names)[:MAX_SCOPES])


def needs_interface(host: str) -> bool:
    """Whether a host is a link-local IPv6 address, with or without brackets and zone.

    Such an address can be dialled only through a named interface of the dialling machine. Other programs, such as a
    proxy or Prometheus, do not know that name and have no place for it.
    """
    ip = _ip(host.strip("[]"))
    return isinstance(ip, IPv6Address) and ip.is_link_local


def link_kind(address: str, interfaces: Iterable[Interface]) -> LinkKind:
    """The kind of link that carries packets to an address, judged by this machine's own networks."""
    ip = _ip(split(address)[0])
    if ip is None:
        return LinkKind.UNKNOWN
    if ip.is_loopback:
        return LinkKind.LOOPBACK
    scope = ip.scope_id if isinstance(ip, IPv6Address) else None
    for item in interfaces:
        same_version = item.ip.version == ip.version
        if same_version and (scope in (item.name, str(item.index)) if scope else ip in item.network):
            return item.kind
    return LinkKind.VPN if any(ip.version == net.version and ip in net for net in _OVERLAYS) else LinkKind.UNKNOWN


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:  # a host name
        return None


TYPICAL_BYTES = 64 * 1024
"""Size of the round trip that a path's cost is computed for: a few decode rows, or a piece of a prefill chunk."""
SWITCH_BELOW = 0.7
"""A working path is replaced only by a path that costs less than this share of it: Wi-Fi figures vary by a third."""
MIN_GAIN_MS = 0.3
"""A working path is replaced only if the new one saves this much: paths on one LAN differ by less."""
_STEP = math.log(1.5)


class Path(msgspec.Struct, frozen=True):
    """One path to a peer. rtt_ms, mb_per_s (10^6 bytes): None if not measured. mb_per_s_at: when, in Unix seconds.

    failed: the address did not answer, or another peer answered there.
    """

    address: str
    kind: LinkKind
    rtt_ms: float | None = None
    mb_per_s: float | None = None
    mb_per_s_at: float | None = None
    failed: bool = False

    @property
    def works(self) -> bool:
        return not self.failed and self.rtt_ms is not None

    def cost_ms(self, *, with_goodput: bool = True) -> float:
        """Milliseconds for a round trip that carries TYPICAL_BYTES. Call it only for a path that works."""
        assert self.rtt_ms is not None, "the path has been measured"
        transfer_ms = TYPICAL_BYTES / 1000 / self.mb_per_s if with_goodput and self.mb_per_s else 0.0
        return self.rtt_ms + transfer_ms


def best_path(paths: Sequence[Path], current: str | None = None) -> Path | None:
    """Chooses the path to use: the cheapest working path whose link kind does not come last; None if no path works.

    Costs within half of each other count as equal; then the better kind of link decides, then the given order.
    `current` (an address) stays in use unless it fails, its kind comes last, or another path is clearly cheaper.
    """
    working = [path for path in paths if path.works]
    if not working:
        return None
    fair = all(path.mb_per_s for path in working)

    def rank(path: Path) -> tuple[bool, int, int]:
        bucket = math.floor(math.log(max(path.cost_ms(with_goodput=fair), 0.2)) / _STEP)
        return path.kind.comes_last, bucket, path.kind

    best = min(working, key=rank)
    held = next((path for path in working if path.address == current), None)
    if held is None or held.kind.comes_last != best.kind.comes_last:
        return best
    gain_ms = held.cost_ms(with_goodput=fair) - best.cost_ms(with_goodput=fair)
    clearly = gain_ms > MIN_GAIN_MS and gain_ms > (1 - SWITCH_BELOW) * held.cost_ms(with_goodput=fair)
    return best if clearly else held


MAX_MACS = 8
"""Most network cards of one machine."""

_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")


def valid_macs(macs: Iterable[str]) -> tuple[str, ...]:
    """Returns the MAC addresses that belong to a single card, lower case, at most MAX_MACS."""
    lower = dict.fromkeys(mac.lower().replace("-", ":") for mac in macs)
    usable = [mac for mac in lower if _MAC.fullmatch(mac) and any(bytes.fromhex(mac.replace(":", "")))]
    return tuple(mac for mac in usable if not int(mac[:2], 16) & 1)[:MAX_MACS]  # an odd first byte is a group address


_ENDPOINT = re.compile(r"/+(v1(/+(models|chat/completions|completions|responses|embeddings|messages))?/*)?\Z")


def base_path(path: str) -> str:
    """The path without slashes at its end and without a last `/v1`, alone or with a known endpoint behind it.

    Clients want `/v1` in their base URL. A `/v1` in the middle, as in the URLs of some gateways, stays.
    """
    return _ENDPOINT.sub("", path)
