"""Decides which addresses and URLs the web tools may call. Pure.

A page could otherwise be used to reach what only this machine or its network can reach: other services of the machine,
routers, the metadata service of a cloud, or the peers of the mesh.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Set

import msgspec
from yarl import URL

from exo_mesh.errors import InputError

MAX_URL_CHARS = 2048
PORTS = frozenset({80, 443})
"""The ports of http and https; further ones are a setting."""

_V6_GLOBAL = ipaddress.ip_network("2000::/3")
"""All that is assigned as global unicast (IANA)."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""The last 32 bits are an IPv4 address (RFC 6052)."""
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20")))
"""Not public, although older versions of `ipaddress` say so: protocol assignments (RFC 6890), which Oracle's metadata
service uses, 6to4 relays, Azure's WireServer, documentation (RFC 9637)."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRules(msgspec.Struct, frozen=True):
    """What the tools may call. ports: besides 80 and 443. own: addresses of this mesh, which are refused although they
    may be public. allowed: (address, port) pairs that are allowed whatever they are; only tests set any."""

    ports: frozenset[int] = frozenset()
    own: frozenset[str] = frozenset()
    allowed: Set[tuple[str, int]] = frozenset()

    def check_url(self, text: str) -> URL:
        """The parsed URL, without its fragment. Raises InputError if the tools do not call such URLs."""
        url = _parsed(text)
        if url.scheme not in ("http", "https"):
            raise _refused(f"the URL begins with {url.scheme or 'nothing'}:, but only http and https are allowed")
        if not url.raw_host or url.port is None:
            raise _refused("the URL has no host")
        if url.user is not None or url.password is not None:
            raise _refused("the URL contains a user name or password, which is not allowed")
        is_listed = any(url.port == port for _, port in self.allowed)
        if url.port not in PORTS | self.ports and not is_listed:
            raise _refused(f"port {url.port} is not allowed; add it with --web-tools-port on this node")
        return url.with_fragment(None)

    def check_addresses(self, host: str, port: int, addresses: Collection[str]) -> None:
        """Raises InputError if one of the addresses of a host is not a public one: a name with both kinds is probably
        an attack."""
        for address in addresses:
            if (address, port) not in self.allowed and not self._is_public(address):
                raise _refused(f"{host} is not a public address, and the web tools call no others")

    def _is_public(self, text: str) -> bool:
        if "%" in text:
            return False  # an address with a zone belongs to one interface of this machine
        try:
            address = unwrapped(ipaddress.ip_address(text))
        except ValueError:
            return False
        return is_public(address) and str(address) not in self.own


def unwrapped(address: Address) -> Address:
    """The IPv4 address inside of an IPv6 address that only carries one; else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR and address.sixtofour is not None:
        return address.sixtofour
    return address


def is_public(address: Address) -> bool:
    """Whether anybody on the Internet reaches the same machine by this address; it must be unwrapped."""
    if address.is_multicast or not address.is_global:
        return False  # multicast, private, loopback, link-local, CGNAT, unspecified, reserved
    if any(address.version == network.version and address in network for network in _SPECIAL):
        return False
    return isinstance(address, ipaddress.IPv4Address) or address in _V6_GLOBAL


def _parsed(text: str) -> URL:
    if not 0 < len(text) <= MAX_URL_CHARS or not text.isprintable():
        raise _refused(f"url must have 1 to {MAX_URL_CHARS} printable characters")
    try:
        return URL(text)
    except ValueError as exc:
        raise _refused(f"this is not a URL: {exc}") from exc


def _refused(message: str) -> InputError:
    return InputError(message, param="url")
