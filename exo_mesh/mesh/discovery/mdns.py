"""Finds peers by mDNS (RFC 6762, 6763) under `_exo-mesh._tcp.local.`, with python-zeroconf."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import ip_address

from zeroconf import DNSQuestionType, IPVersion, ServiceStateChange, Zeroconf
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from exo_mesh.base.printable import reason_of
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.addresses import Interface, LinkKind, advertised, dialable, joined, split
from exo_mesh.errors import TransportError
from exo_mesh.machine.interfaces import read_interfaces
from exo_mesh.mesh.discovery.port import Announcement, Suggest

SERVICE_TYPE = "_exo-mesh._tcp.local."
MAX_SERVICES = 1024
"""Most services that are remembered, because the LAN may be hostile."""
REFRESH_EVERY_S = 2.0
"""Interval at which interfaces are read and known addresses are suggested again: a peer may have returned."""
RESOLVE_MS = 3000
STOP_S = 1.0
"""Time for saying goodbye: three packets, 125 ms apart."""

_log = logging.getLogger(__name__)


def service_info(own: Announcement, addresses: Sequence[str]) -> AsyncServiceInfo:
    """The service that a node registers. Instance and host are named after the node's id, so names never clash.

    addresses: "host:port" as advertised; entries with host names are left out. TXT: id, ns, proto, name.
    """
    label = f"exo-mesh-{own.node_id[:16]}"
    texts = {"id": own.node_id, "ns": own.namespace, "proto": str(own.protocol), "name": own.name[:120]}
    hosts = []
    for address in addresses:
        with contextlib.suppress(ValueError):
            hosts.append(str(ip_address(split(address)[0])))
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{label}.{SERVICE_TYPE}",
        port=own.control_port,
        properties=texts,
        server=f"{label}.local.",
        parsed_addresses=hosts,
    )


def addresses_in(info: AsyncServiceInfo, own: Announcement) -> list[str]:
    """ "host:port" of a node that was found; [] for this node itself and for nodes of other namespaces."""
    texts = info.decoded_properties
    if texts.get("ns") != own.namespace or not texts.get("id") or texts["id"] == own.node_id or not info.port:
        return []
    return [joined(host, info.port) for host in info.parsed_scoped_addresses()]


class MdnsDiscovery:
    """Registers this node and browses for others. host: the address that the control endpoint is bound to.

    With loopback_only no packet leaves the machine.
    """

    name = "mdns"

    def __init__(
        self,
        *,
        host: str = "0.0.0.0",
        loopback_only: bool = False,
        read: Callable[[], list[Interface]] = read_interfaces,
    ) -> None:
        self._host = host
        self._loopback_only = loopback_only
        self._read = read
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._info: AsyncServiceInfo | None = None
        self._announcing: Awaitable[None] | None = None
        self._tasks = TaskOwner()
        self._found: dict[str, list[str]] = {}

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        logging.getLogger("zeroconf").setLevel(logging.ERROR)  # it warns of every malformed packet on the LAN
        interfaces = self._read()
        try:
            self._zeroconf = AsyncZeroconf(interfaces=self._bindings(interfaces), ip_version=self._version(interfaces))
            self._info = service_info(own, self._addresses(own, interfaces))
            await self._zeroconf.zeroconf.async_wait_for_start()
            # The name contains the node's id, so there is no need to probe whether it is free.
            self._announcing = await self._zeroconf.async_register_service(self._info, cooperating_responders=True)
        except (OSError, RuntimeError, ZeroconfError) as exc:
            await self.stop()
            raise TransportError(f"mDNS does not work on this machine: {reason_of(exc)}") from exc
        zeroconf = self._zeroconf.zeroconf

        def on_change(*, name: str, state_change: ServiceStateChange, **_: object) -> None:
            self._on_change(zeroconf, own, suggest, name, state_change)

        self._browser = AsyncServiceBrowser(
            zeroconf, SERVICE_TYPE, handlers=[on_change], question_type=DNSQuestionType.QM
        )
        self._tasks.keep(lambda: self._keep_fresh(own, suggest, interfaces), "mdns refresh")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        await self._tasks.close()
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None
        if self._announcing is not None:  # three packets in the background; ends by itself
            await asyncio.gather(self._announcing, return_exceptions=True)
            self._announcing = None
        if self._zeroconf is not None:
            with contextlib.suppress(TimeoutError, OSError, ZeroconfError):
                async with asyncio.timeout(STOP_S):
                    await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()
            self._zeroconf = None

    def _on_change(
        self, zeroconf: Zeroconf, own: Announcement, suggest: Suggest, name: str, change: ServiceStateChange
    ) -> None:
        if change is ServiceStateChange.Removed:
            self._found.pop(name, None)
        elif name in self._found or len(self._found) < MAX_SERVICES:
            self._found.setdefault(name, [])
            self._tasks.start(self._resolve(zeroconf, own, suggest, name), f"resolve {name[:40]}")

    async def _resolve(self, zeroconf: Zeroconf, own: Announcement, suggest: Suggest, name: str) -> None:
        try:
            info = AsyncServiceInfo(SERVICE_TYPE, name)  # refuses names with control characters
            complete = await info.async_request(zeroconf, RESOLVE_MS)
        except (OSError, ZeroconfError) as exc:
            _log.debug("mDNS: %s cannot be resolved: %s", name, exc)
            return
        if complete and name in self._found:
            self._found[name] = addresses_in(info, own)
            self._suggest_all(suggest, self._found[name], self._read())

    def _suggest_all(self, suggest: Suggest, addresses: list[str], interfaces: list[Interface]) -> None:
        for address in addresses:
            for usable in dialable(address, interfaces):
                if not self._loopback_only or ip_address(split(usable)[0]).is_loopback:
                    suggest(usable)

    async def _keep_fresh(self, own: Announcement, suggest: Suggest, interfaces: list[Interface]) -> None:
        while True:
            await next_wakeup(REFRESH_EVERY_S)
            now = self._read()
            if now != interfaces:
                interfaces = now
                await self._follow(own, now)
            for addresses in list(self._found.values()):
                self._suggest_all(suggest, addresses, interfaces)

    async def _follow(self, own: Announcement, interfaces: list[Interface]) -> None:
        """Handle a change of the interfaces: listen on the present ones, and advertise their addresses."""
        assert self._zeroconf is not None, "it runs"
        info = service_info(own, self._addresses(own, interfaces))
        try:
            await self._zeroconf.zeroconf.async_update_interfaces(self._bindings(interfaces), self._version(interfaces))
            await (await self._zeroconf.async_update_service(info))
        except (OSError, RuntimeError, ZeroconfError) as exc:
            _log.debug("mDNS: cannot adapt to changed interfaces: %s", exc)
            return
        self._info = info

    def _addresses(self, own: Announcement, interfaces: list[Interface]) -> tuple[str, ...]:
        host = "127.0.0.1" if self._host == "localhost" else self._host
        return advertised(host, own.control_port, interfaces)

    def _bindings(self, interfaces: list[Interface]) -> list[str | int]:
        """Addresses (IPv4) and indices (IPv6) of the interfaces to use; the loopback is always included."""
        if self._loopback_only:
            return ["127.0.0.1"]
        lan = [item for item in interfaces if item.kind is not LinkKind.LOOPBACK]
        four = [item.address for item in lan if item.ip.version == 4]
        return ["127.0.0.1", *four, *self._v6_indices(lan)]

    def _version(self, interfaces: list[Interface]) -> IPVersion:
        lan = [item for item in interfaces if item.kind is not LinkKind.LOOPBACK]
        return IPVersion.All if not self._loopback_only and self._v6_indices(lan) else IPVersion.V4Only

    @staticmethod
    def _v6_indices(lan: list[Interface]) -> list[str | int]:
        return list(dict.fromkeys(item.index for item in lan if item.ip.version == 6 and item.ip.is_link_local))
