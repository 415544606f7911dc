"""Finds peers on the LAN and on this machine by UDP broadcast and IPv6 link-local multicast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any

from msgspec.structs import replace

from exo_mesh.base.printable import reason_of
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.addresses import WILDCARDS, Interface, LinkKind, joined
from exo_mesh.errors import TransportError
from exo_mesh.machine.interfaces import read_interfaces
from exo_mesh.mesh.discovery.port import Announcement, Suggest
from exo_mesh.mesh.discovery.udp_sockets import GroupListener, Senders, listening_socket, loopback_target
from exo_mesh.security.datagrams import MAGIC, DatagramVerdict, RefusedDatagrams, Seal

ANNOUNCE_EVERY_S = 2.0
MAX_DATAGRAM_BYTES = 1024
"""Longest announcement that is read. An announcement has about 150 bytes; longer datagrams come from other programs."""

FIRST_PAUSES_S = (0.25, 0.75)
"""A node that has just started repeats its announcement sooner: a datagram may be lost, and its peers wait for it."""

_MAGIC = "exo-mesh"
_VERSION = 1
_log = logging.getLogger(__name__)


def encode(own: Announcement) -> bytes:
    """The datagram that announces a node."""
    fields = {"mesh": _MAGIC, "v": _VERSION, "ns": own.namespace, "id": own.node_id, "port": own.control_port}
    if own.host:
        fields["host"] = own.host
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(datagram: bytes) -> Announcement | None:
    """The announcement in a datagram; None for anything else, because the port is open to the whole LAN."""
    if len(datagram) > MAX_DATAGRAM_BYTES:
        return None
    try:
        fields = json.loads(datagram)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("mesh") != _MAGIC or fields.get("v") != _VERSION:
        return None
    namespace, node_id, port, host = fields.get("ns"), fields.get("id"), fields.get("port"), fields.get("host", "")
    if not isinstance(namespace, str) or not isinstance(node_id, str) or type(port) is not int:
        return None
    if not node_id or not 0 < port < 65536 or not (host == "" or _is_loopback(host)):
        return None
    return Announcement(namespace, node_id, port, host=host)


def _is_loopback(host: Any) -> bool:
    """Whether the host is a loopback address. Other hosts are refused, so that no announcement directs this node to a
    third machine."""
    try:
        return isinstance(host, str) and ip_address(host).is_loopback
    except ValueError:
        return False


class UdpDiscovery:
    """Announces this node on `broadcast_port` and listens on `listen_port`, which all nodes of a machine share.

    host: the address that the control endpoint is bound to. A receiver dials the address that an announcement came
    from, so announcements are sent only from that address. With loopback_only no packet leaves the machine and none
    from outside is accepted. With a seal, announcements are signed and only signed ones are accepted. The interfaces
    are read again before each announcement.
    """

    name = "udp"

    def __init__(
        self,
        listen_port: int,
        broadcast_port: int,
        *,
        loopback_only: bool = False,
        host: str = "0.0.0.0",
        read: Callable[[], list[Interface]] = read_interfaces,
        loopback: str | None = None,
        seal: Seal | None = None,
    ) -> None:
        self._listen_port = listen_port
        self._loopback_only = loopback_only
        self._seal = seal
        self.refusals = RefusedDatagrams()
        self._host = host.strip("[]")
        self._read = read
        self._loopback = loopback or loopback_target()
        self._senders = Senders(broadcast_port, self._loopback)
        self._group: GroupListener | None = None
        self._transports: list[asyncio.DatagramTransport] = []
        self._tasks = TaskOwner()

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        try:
            sock = listening_socket(self._listen_port, self._loopback_only, self._loopback)
        except OSError as exc:
            raise TransportError(
                f"cannot listen for announcements on UDP port {self._listen_port}: {reason_of(exc)}"
            ) from exc
        await self._listen(sock, own, suggest)
        if not self._loopback_only:
            try:
                self._group = GroupListener(self._listen_port)
            except OSError as exc:  # this machine has no IPv6
                _log.debug("no announcements over IPv6: %s", exc)
            else:
                await self._listen(self._group.sock, own, suggest)
        datagram = encode(replace(own, host=self._host if self._sends_host else ""))
        self._tasks.keep(lambda: self._keep_announcing(datagram), "udp discovery")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        await self._tasks.close()
        for transport in self._transports:
            transport.close()
        self._transports.clear()
        self._senders.close()

    async def _listen(self, sock: socket.socket, own: Announcement, suggest: Suggest) -> None:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Listener(own, suggest, self._loopback_only, self._seal, self.refusals), sock=sock
        )
        self._transports.append(transport)

    async def _keep_announcing(self, datagram: bytes) -> None:
        pauses = iter(FIRST_PAUSES_S)
        while True:
            interfaces = [item for item in self._read() if self._announces_from(item)]
            if self._group is not None:
                self._group.join(interfaces)
            self._senders.announce(lambda: self._sealed(datagram), interfaces)
            await asyncio.sleep(next(pauses, ANNOUNCE_EVERY_S))

    def _sealed(self, datagram: bytes) -> bytes:
        """The datagram to send. Each copy gets its own signature, because a repeated one counts as a replay."""
        return datagram if self._seal is None else self._seal.close(datagram)

    def _announces_from(self, item: Interface) -> bool:
        if self._loopback_only:
            return item.kind is LinkKind.LOOPBACK
        return self._host in WILDCARDS or item.address == self._host.partition("%")[0]

    @property
    def _sends_host(self) -> bool:
        """Whether announcements carry the host: those on the loopback come from 127.0.0.1, but the control port may be
        bound to ::1 or 127.0.0.2."""
        return self._loopback_only and _is_loopback(self._host) and self._host != "127.0.0.1"


class _Listener(asyncio.DatagramProtocol):
    def __init__(
        self, own: Announcement, suggest: Suggest, loopback_only: bool, seal: Seal | None, refusals: RefusedDatagrams
    ) -> None:
        self._own = own
        self._suggest = suggest
        self._loopback_only = loopback_only
        self._seal = seal
        self._refusals = refusals

    def datagram_received(self, data: bytes, addr: tuple[str | int, ...]) -> None:
        payload = self._opened(data, str(addr[0]))
        heard = None if payload is None else decode(payload)
        if heard is None or heard.namespace != self._own.namespace or heard.node_id == self._own.node_id:
            return
        host = str(addr[0])
        from_here = host.startswith("127.")
        if heard.host and from_here:
            self._suggest(joined(heard.host, heard.control_port))
        elif not heard.host and (from_here or not self._loopback_only):
            self._suggest(joined(_scoped(host, addr), heard.control_port))

    def _opened(self, data: bytes, host: str) -> bytes | None:
        """The payload of a datagram; None if this mesh did not sign it, or it was received before."""
        if self._seal is None:
            opened: bytes | DatagramVerdict = DatagramVerdict.SEALED if data.startswith(MAGIC) else data
        else:
            opened = self._seal.open(data) if len(data) <= MAX_DATAGRAM_BYTES else DatagramVerdict.UNSIGNED
        if not isinstance(opened, DatagramVerdict):
            return opened
        if line := self._refusals.note(host, opened):
            _log.warning("%s", line)
        return None


def _scoped(host: str, addr: tuple[str | int, ...]) -> str:
    """A link-local IPv6 address with the interface on which it was received."""
    if "%" not in host and host.startswith("fe80:") and len(addr) == 4 and addr[3]:
        with contextlib.suppress(OSError):  # the interface has gone meanwhile
            return f"{host}%{socket.if_indextoname(int(addr[3]))}"
    return host
