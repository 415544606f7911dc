"""Sends the Wake-on-LAN packets that wake a machine of the same network, and finds this machine's MAC addresses.

A magic packet is six bytes of 0xff and 16 times the MAC address (AMD, "Magic Packet Technology", 1995). It is sent as a
UDP broadcast to port 9. No process needs to listen there: the network card reads it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, ip_address

import psutil

from exo_mesh.domain.addresses import Interface, LinkKind, split, valid_macs

PORT = 9
COPIES = 3
"""Copies of each packet: broadcasts are not retransmitted, and Wi-Fi loses some."""

_log = logging.getLogger(__name__)


def magic_packet(mac: str) -> bytes:
    """The magic packet for "aa:bb:cc:dd:ee:ff"."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def own_macs(interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """The MAC addresses of the network cards that connect this machine to a LAN."""
    names = {one.name for one in interfaces if one.kind is not LinkKind.LOOPBACK and one.broadcast}
    cards = psutil.net_if_addrs()
    return valid_macs(
        entry.address for name in sorted(names) for entry in cards.get(name, ()) if entry.family == psutil.AF_LINK
    )


def shared_networks(addresses: Iterable[str], interfaces: Sequence[Interface]) -> list[tuple[str, str]]:
    """(own address, broadcast address) of each LAN of this machine that contains one of the addresses."""
    hosts = [ip for address in addresses if (ip := _ipv4(address)) is not None]
    found = {
        (one.address, one.broadcast): None
        for one in interfaces
        if one.broadcast and any(host in one.network for host in hosts)
    }
    return list(found)


def send_magic_packets(macs: Iterable[str], networks: Iterable[tuple[str, str]], port: int = PORT) -> int:
    """Broadcast the packets for these MAC addresses in these networks. Returns the number of networks in which it
    worked."""
    packets = [magic_packet(mac) for mac in macs]
    num_sent = 0
    for own, broadcast in networks:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sock.bind((own, 0))
                for packet in packets * COPIES:
                    sock.sendto(packet, (broadcast, port))
        except OSError as exc:
            _log.warning("cannot send a magic packet to %s: %s", broadcast, exc)
        else:
            num_sent += 1
    return num_sent


def _ipv4(address: str) -> IPv4Address | None:
    try:
        found = ip_address(split(address)[0])
    except ValueError:
        return None
    return found if isinstance(found, IPv4Address) and not found.is_loopback else None
