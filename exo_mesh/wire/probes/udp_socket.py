"""The UDP socket of probe datagrams. It reads a limited number of datagrams in each tenth of a second, so that a flood
takes little of a node's time: the kernel drops the rest, and peers call instead."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address

from exo_mesh.domain.addresses import WILDCARDS

WINDOW_S = 0.1
MAX_IN_WINDOW = 100
"""Most datagrams read in WINDOW_S. Sixteen peers, the most of a mesh that uses datagrams, send some 40 a second.
At this limit forged datagrams take 2 % of an x86 core (docs/tasks/security.md)."""

RESOLVE_S = 5.0
"""Deadline for looking up the host name to listen on."""

Address = tuple[str, int] | tuple[str, int, int, int]
"""What sendto takes: (ip, port) of IPv4, (ip, port, flow, interface) of IPv6."""

_log = logging.getLogger(__name__)


class UdpSocket:
    """Calls hear(data, sender) for each datagram, and reads at most max_bytes + 1 bytes of it.

    max_in_window, window_s: after this many datagrams the socket is not read until the window is over.
    """

    def __init__(
        self,
        sock: socket.socket,
        hear: Callable[[bytes, Address], None],
        max_bytes: int,
        max_in_window: int = MAX_IN_WINDOW,
        window_s: float = WINDOW_S,
    ) -> None:
        self._sock = sock
        self._hear = hear
        self._most_bytes = max_bytes + 1  # one more shows that a datagram is too long
        self._max_in_window, self._window_s = max_in_window, window_s
        self._loop = asyncio.get_running_loop()
        self._window_end = 0.0
        self._num_read = 0
        self._resume: asyncio.TimerHandle | None = None
        self._versions = _versions(sock)
        self._loop.add_reader(sock, self._read)

    def close(self) -> None:
        """Stop reading and close the socket; another call does nothing."""
        if self._resume is not None:
            self._resume.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def address_of(self, host: str, port: int) -> Address | None:
        """Where to send for a host, an IP address without brackets. None if this socket cannot send there: a host name,
        an IP version that the socket does not have, a port that does not exist, or a link-local address of IPv6 without
        its interface or with one that is gone."""
        try:
            ip = ip_address(host)
        except ValueError:
            return None
        if ip.version not in self._versions or not 0 < port < 2**16:
            return None
        if isinstance(ip, IPv4Address):
            return (f"::ffff:{ip}", port, 0, 0) if self._sock.family == socket.AF_INET6 else (str(ip), port)
        interface = _interface(ip)
        return None if interface is None else (str(ip).partition("%")[0], port, 0, interface)

    def send(self, data: bytes, to: Address) -> None:
        """Send a datagram, or drop it if the kernel does not take it now: a probe that waits is of no use."""
        try:
            self._sock.sendto(data, to)
        except OSError as exc:  # no route, or no room in the kernel
            _log.debug("a datagram to %s cannot be sent: %s", to[0], exc)

    def _read(self) -> None:
        """Read one datagram."""
        now = self._loop.time()
        if now >= self._window_end:
            self._window_end, self._num_read = now + self._window_s, 0
        self._num_read += 1
        if self._num_read > self._max_in_window:
            self._loop.remove_reader(self._sock)
            self._resume = self._loop.call_at(self._window_end, self._read_again)
            return
        try:
            data, sender = self._sock.recvfrom(self._most_bytes)
        except OSError:  # nothing is there, or an earlier datagram could not be delivered
            return
        self._hear(data, sender)

    def _read_again(self) -> None:
        self._resume = None
        self._loop.add_reader(self._sock, self._read)


async def listening(host: str, port: int) -> socket.socket:
    """A UDP socket bound to host:port. As for gRPC, a wildcard of either IP version stands for both. Raises OSError if
    that cannot be bound."""
    if host in WILDCARDS:
        try:
            return _bound(socket.AF_INET6, ("::", port), takes_both=True)
        except OSError:  # a machine without IPv6
            return _bound(socket.AF_INET, ("0.0.0.0", port))
    async with asyncio.timeout(RESOLVE_S):
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
    for number, (family, _, _, _, address) in enumerate(found, 1):
        try:
            return _bound(socket.AddressFamily(family), address)
        except OSError:
            if number == len(found):
                raise
    raise OSError(f"{host} has no address")


def _bound(family: socket.AddressFamily, address: tuple[object, ...], *, takes_both: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if takes_both else 1)
        sock.setblocking(False)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _versions(sock: socket.socket) -> tuple[int, ...]:
    if sock.family == socket.AF_INET:
        return (4,)
    return (6,) if sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) else (4, 6)


def _interface(ip: IPv6Address) -> int | None:
    """The number of the interface of a link-local address; 0 for other addresses. None if there is no such one."""
    if not ip.is_link_local:
        return 0
    scope = ip.scope_id or ""
    if scope.isdecimal():
        return int(scope)
    try:
        return socket.if_nametoindex(scope)
    except OSError:
        return None
