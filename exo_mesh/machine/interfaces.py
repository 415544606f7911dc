"""Reads the network interfaces of this machine, each time from the system, because they come and go."""

from __future__ import annotations

import math
import platform
import socket
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path

import psutil

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.domain.addresses import Interface, LinkKind, kind_of_interface

_SYS_NET = Path("/sys/class/net")


def read_interfaces() -> list[Interface]:
    """Every address of every interface that is up and can reach a peer, including the loopback.

    Takes about a millisecond. An interface that disappears while it is read is left out.
    """
    system = platform.system()
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found: list[Interface] = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        kind = _kind(name, system) if name in up else None
        if kind is None:
            continue
        try:
            index = socket.if_nametoindex(name)
        except OSError:
            index = 0
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = entry.address.partition("%")[0]
                full = 32 if entry.family == socket.AF_INET else 128
                found.append(Interface(name, address, _prefix_len(entry.netmask, full), kind, index))
    return found


RECENT_S = 1.0


class RecentInterfaces:
    """The interfaces as they were at most RECENT_S ago, for frequent callers."""

    def __init__(self, read: Callable[[], list[Interface]] = read_interfaces, clock: Clock = monotonic) -> None:
        self._read = read
        self._clock = clock
        self._read_at = -math.inf
        self._interfaces: list[Interface] = []

    def __call__(self) -> list[Interface]:
        if self._clock() - self._read_at > RECENT_S:
            self._interfaces = self._read()
            self._read_at = self._clock()
        return self._interfaces


recent_interfaces = RecentInterfaces()


def _kind(name: str, system: str) -> LinkKind | None:
    folder = _SYS_NET / name
    wireless, bridge = (folder / "wireless").exists(), (folder / "bridge").exists()
    # A bridge that an administrator made over the network card carries the LAN; it is usually called br0.
    return kind_of_interface(name, system, wireless=wireless, bridge=bridge and not name.startswith("br"))


def _prefix_len(netmask: str | None, full: int) -> int:
    if not netmask:
        return full
    if ":" in netmask:
        return sum(int(group, 16).bit_count() for group in netmask.split(":") if group)
    try:
        return ip_network(f"0.0.0.0/{netmask}").prefixlen
    except ValueError:
        return full
