"""The sockets of UDP discovery: one to listen on per address family, one to announce from per interface address."""

from __future__ import annotations

import contextlib
import errno
import logging
import platform
import socket
import struct
from collections.abc import Callable, Iterable, Iterator

import msgspec

from exo_mesh.domain.addresses import Interface, LinkKind

LIMITED_BROADCAST = "255.255.255.255"
LOOPBACK_BROADCAST = "127.255.255.255"
"""Reaches every node on this machine, on Linux."""
LOOPBACK_GROUP = "239.255.86.78"
"""Reaches every node on this machine on other systems, which have multicast but no broadcast on the loopback.
Administratively scoped."""
GROUP_V6 = "ff12::6578:6f6d"
"""Link-local, transient (RFC 4291); the last four bytes spell "exom"."""

_MACOS_BOUND_IF = 25
_HINT = (
    "cannot send announcements to the local network: no route to host. On macOS allow it in System Settings, "
    "Privacy & Security, Local Network; otherwise check the firewall, or name peers with --bootstrap-peers"
)
_log = logging.getLogger(__name__)


class Target(msgspec.Struct, frozen=True):
    """A destination of announcements from one interface."""

    interface: Interface
    address: str


def loopback_target() -> str:
    """The address at which all nodes of this machine receive an announcement."""
    return LOOPBACK_BROADCAST if platform.system() == "Linux" else LOOPBACK_GROUP


def targets(interfaces: Iterable[Interface], loopback: str) -> Iterator[Target]:
    """The destinations of announcements: per IPv4 network its directed and the limited broadcast, per IPv6 link the
    group, and `loopback` on this machine."""
    links: set[str] = set()
    for item in interfaces:
        if item.kind is LinkKind.LOOPBACK:
            if item.address == "127.0.0.1":
                yield Target(item, loopback)
        elif item.ip.version == 6:
            if item.ip.is_link_local and item.name not in links:
                links.add(item.name)
                yield Target(item, GROUP_V6)
        elif item.broadcast is not None:
            yield Target(item, item.broadcast)
            yield Target(item, LIMITED_BROADCAST)


class Senders:
    """The sending sockets, one per interface address: opened when the address appears, closed when it disappears."""

    def __init__(self, port: int, loopback: str) -> None:
        self._port = port
        self._loopback = loopback
        self._sockets: dict[Interface, socket.socket] = {}
        self._silenced: set[Target] = set()
        self._hinted = False

    def announce(self, make: Callable[[], bytes], interfaces: list[Interface]) -> None:
        """Send one datagram, which `make` creates, to every target of these interfaces.

        A failure is logged once per target and retried with the next announcement.
        """
        for gone in self._sockets.keys() - set(interfaces):
            self._sockets.pop(gone).close()
        todo = list(targets(interfaces, self._loopback))
        self._silenced.intersection_update(todo)
        outcomes = {target: self._send(make(), target) for target in todo}
        lan = [code for target, code in outcomes.items() if target.interface.kind is not LinkKind.LOOPBACK]
        if lan and not self._hinted and all(code == errno.EHOSTUNREACH for code in lan):
            self._hinted = True
            _log.warning(_HINT)

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _send(self, datagram: bytes, target: Target) -> int:
        """Send one datagram. Returns 0 or the errno: an interface may be down or forbid broadcast while the others
        work."""
        try:
            sock = self._sockets.get(target.interface)
            if sock is None:
                sock = self._sockets[target.interface] = _sending_socket(target.interface, self._loopback)
            sock.sendto(datagram, (target.address, self._port))
        except OSError as exc:
            if target not in self._silenced:
                self._silenced.add(target)
                _log.debug("no announcement to %s on %s: %s", target.address, target.interface.name, exc)
            return exc.errno or errno.EIO
        self._silenced.discard(target)
        return 0


def _sending_socket(interface: Interface, loopback: str) -> socket.socket:
    family = socket.AF_INET6 if interface.ip.version == 6 else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, interface.index)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 1)
            return sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.bind((interface.address, 0))  # the address that receivers will dial
        if interface.kind is not LinkKind.LOOPBACK:
            _pin(sock, interface)
        elif loopback == LOOPBACK_GROUP:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    except OSError:
        sock.close()
        raise
    return sock


def _pin(sock: socket.socket, interface: Interface) -> None:
    """Keep the limited broadcast on this interface; otherwise it would use the default route, if there is one.

    Linux allows this without privileges since 5.7. Where it is forbidden, the directed broadcast still works.
    """
    with contextlib.suppress(OSError):
        if hasattr(socket, "SO_BINDTODEVICE"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.name.encode() + b"\0")
        elif platform.system() == "Darwin":
            sock.setsockopt(socket.IPPROTO_IP, _MACOS_BOUND_IF, interface.index)


def listening_socket(port: int, loopback_only: bool, loopback: str) -> socket.socket:
    """An IPv4 socket that receives announcements on a port shared by all nodes of this machine. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        _share_port(sock)
        sock.bind((loopback if loopback_only else "", port))
        if loopback == LOOPBACK_GROUP:
            member = socket.inet_aton(LOOPBACK_GROUP) + socket.inet_aton("127.0.0.1")
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    except OSError:
        sock.close()
        raise
    return sock


class GroupListener:
    """An IPv6 socket that is a member of the multicast group on all present interfaces."""

    def __init__(self, port: int) -> None:
        """Raises OSError if there is no IPv6."""
        self.sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self._joined: set[int] = set()
        try:
            self.sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            _share_port(self.sock)
            self.sock.bind(("::", port))
        except OSError:
            self.sock.close()
            raise

    def join(self, interfaces: Iterable[Interface]) -> None:
        """Join the group on every interface with a link-local address; the kernel drops memberships of interfaces that
        are gone."""
        indices = {item.index for item in interfaces if item.ip.version == 6 and item.ip.is_link_local and item.index}
        for index in indices - self._joined:
            member = socket.inet_pton(socket.AF_INET6, GROUP_V6) + struct.pack("@I", index)
            with contextlib.suppress(OSError):  # just gone, or a member already
                self.sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
        self._joined = indices


def _share_port(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.setblocking(False)
