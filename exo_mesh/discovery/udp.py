"""Finding peers on the LAN, and on this machine, by UDP broadcast."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterable

import psutil

from exo_mesh.discovery.port import Announcement, Suggest
from exo_mesh.errors import TransportError
from exo_mesh.security.datagrams import MAGIC, Refusals, Seal, Verdict

ANNOUNCE_EVERY_S = 2.0
MAX_DATAGRAM_BYTES = 1024
"""An announcement has about 150 bytes; anything longer is not ours."""

LOOPBACK_BROADCAST = "127.255.255.255"
"""Reaches every node on this machine. Linux has it; elsewhere sending fails and is skipped."""

_MAGIC = "exo-mesh"
_VERSION = 1
_log = logging.getLogger(__name__)


def encode(own: Announcement) -> bytes:
    """The datagram that announces a node."""
    fields = {"mesh": _MAGIC, "v": _VERSION, "ns": own.namespace, "id": own.node_id, "port": own.control_port}
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(datagram: bytes) -> Announcement | None:
    """The announcement in a datagram, or None for anything else: the port is open to the whole LAN."""
    if len(datagram) > MAX_DATAGRAM_BYTES:
        return None
    try:
        fields = json.loads(datagram)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("mesh") != _MAGIC or fields.get("v") != _VERSION:
        return None
    namespace, node_id, port = fields.get("ns"), fields.get("id"), fields.get("port")
    if not isinstance(namespace, str) or not isinstance(node_id, str) or type(port) is not int:
        return None
    return Announcement(namespace, node_id, port) if node_id and 0 < port < 65536 else None


def broadcast_addresses() -> list[str]:
    """Where to announce: the broadcast address of every IPv4 interface that is up, and that of the loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        address.broadcast
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in up and address.family == socket.AF_INET and address.broadcast
    ]
    return list(dict.fromkeys([LOOPBACK_BROADCAST, *found]))


class UdpDiscovery:
    """Announces this node on `broadcast_port` and listens on `listen_port`, which all nodes of a machine share.

    With loopback_only neither a packet leaves the machine nor one from outside is heard. With a seal, announcements are
    signed and only signed ones are heard.
    """

    name = "udp"

    def __init__(
        self,
        listen_port: int,
        broadcast_port: int,
        *,
        loopback_only: bool = False,
        addresses: Callable[[], Iterable[str]] = broadcast_addresses,
        seal: Seal | None = None,
    ) -> None:
        self._listen_port = listen_port
        self._broadcast_port = broadcast_port
        self._loopback_only = loopback_only
        self._seal = seal
        self.refusals = Refusals()
        self._addresses: Callable[[], Iterable[str]] = (lambda: (LOOPBACK_BROADCAST,)) if loopback_only else addresses
        self._transport: asyncio.DatagramTransport | None = None
        self._task: asyncio.Task[None] | None = None
        self._silenced: set[str] = set()

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock = _listening_socket(self._listen_port, self._loopback_only)
        except OSError as exc:
            raise TransportError(f"cannot listen for announcements on UDP port {self._listen_port}: {exc}") from exc
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: _Listener(own, suggest, self._loopback_only, self._seal, self.refusals), sock=sock
        )
        self._task = asyncio.create_task(self._keep_announcing(encode(own)), name="udp discovery")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    async def _keep_announcing(self, datagram: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.setblocking(False)
            while True:
                for address in self._addresses():
                    self._announce(sock, datagram, address)
                await asyncio.sleep(ANNOUNCE_EVERY_S)

    def _announce(self, sock: socket.socket, datagram: bytes, address: str) -> None:
        try:
            sealed = datagram if self._seal is None else self._seal.close(datagram)
            sock.sendto(sealed, (address, self._broadcast_port))
            self._silenced.discard(address)
        except OSError as exc:  # an interface may be down or forbid broadcast; the others still work
            if address not in self._silenced:
                self._silenced.add(address)
                _log.debug("no announcement to %s: %s", address, exc)


class _Listener(asyncio.DatagramProtocol):
    def __init__(
        self, own: Announcement, suggest: Suggest, loopback_only: bool, seal: Seal | None, refusals: Refusals
    ) -> None:
        self._own = own
        self._suggest = suggest
        self._loopback_only = loopback_only
        self._seal = seal
        self._refusals = refusals

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        payload = self._opened(data, addr[0])
        heard = None if payload is None else decode(payload)
        if heard is None or heard.namespace != self._own.namespace or heard.node_id == self._own.node_id:
            return
        if not self._loopback_only or addr[0].startswith("127."):
            self._suggest(f"{addr[0]}:{heard.control_port}")

    def _opened(self, data: bytes, host: str) -> bytes | None:
        """What a datagram says; None if this mesh did not sign it, or it was heard before."""
        if self._seal is None:
            opened: bytes | Verdict = Verdict.SEALED if data.startswith(MAGIC) else data
        else:
            opened = self._seal.open(data) if len(data) <= MAX_DATAGRAM_BYTES else Verdict.UNSIGNED
        if not isinstance(opened, Verdict):
            return opened
        if line := self._refusals.note(host, opened):
            _log.warning("%s", line)
        return None


def _listening_socket(port: int, loopback_only: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setblocking(False)
        sock.bind((LOOPBACK_BROADCAST if loopback_only else "", port))
    except OSError:
        sock.close()
        raise
    return sock
