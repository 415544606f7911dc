"""Finds the machines of a Tailscale network through its API (`GET /api/v2/tailnet/{tailnet}/devices`).

The port of a node is an attribute of its device, which the node itself sets (`/api/v2/device/{id}/attributes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from exo_mesh.base.authorities import trusted
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.printable import reason_of
from exo_mesh.base.small_files import read_small
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.addresses import joined
from exo_mesh.errors import InputError, MeshError, TransportError
from exo_mesh.machine.interfaces import recent_interfaces
from exo_mesh.mesh.discovery.port import Announcement, Suggest

API_URL = "https://api.tailscale.com"
ASK_EVERY_S = 15.0
"""Interval of the device queries. Devices of a tailnet change rarely, and the API is rate limited."""
FIRST_BACKOFF_S = 30.0
LAST_BACKOFF_S = 600.0
CALL_S = 10.0
MAX_KEY_BYTES = 4096
"""Bytes that are read of a file with a key; a key has about 60 characters."""
MAX_DEVICES = 1024
MAX_REPLY_BYTES = 8 * 1024 * 1024
PORT_ATTRIBUTE = "custom:exoMeshPort"
PORTS_AGAIN_S = 300.0
"""Time between two reads of the attributes of one device: a node keeps its port unless it is started with another
one."""
MAX_CALLS = 16
"""Devices whose attributes are read in one round; the API returns them only one device at a time."""
REFUSED = (401, 403)
"""HTTP statuses with which the API answers a key that lacks a scope."""

_log = logging.getLogger(__name__)


class TailscaleRefusedError(TransportError):
    """The API does not accept the key, so an early retry does not help."""


def read_key(path: Path) -> str:
    """The API key in a file. Raises InputError."""
    try:
        key = read_small(path, MAX_KEY_BYTES)[:MAX_KEY_BYTES].decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text"
        raise InputError(f"{path}: cannot be read: {reason}", param="tailscale_api_key_file") from exc
    if not key or any(char.isspace() for char in key) or not key.isascii():
        raise InputError(f"{path}: must contain exactly one Tailscale API key", param="tailscale_api_key_file")
    return key


class TailnetDevice(msgspec.Struct, frozen=True):
    """A device of the tailnet. id: for calls about the device, "" if the API gave none. hosts: its addresses."""

    id: str
    hosts: tuple[str, ...]


def devices_in(reply: Any) -> list[TailnetDevice]:
    """The devices in the API's answer that may be online. Raises TransportError for an answer of another shape."""
    devices = reply.get("devices") if isinstance(reply, Mapping) else None
    if not isinstance(devices, list):
        raise TransportError("the Tailscale API sent an answer without a list of devices")
    found: list[TailnetDevice] = []
    for device in devices[:MAX_DEVICES]:
        if not isinstance(device, Mapping) or device.get("connectedToControl") is False:
            continue
        given = device.get("addresses")
        hosts = []
        for address in given[:4] if isinstance(given, list) else ():
            with contextlib.suppress(ValueError):
                hosts.append(str(ip_address(address)))
        name = device.get("nodeId") or device.get("id")
        if hosts:
            found.append(TailnetDevice(name if isinstance(name, str) else "", tuple(hosts)))
    return found


def port_in(reply: Any) -> int | None:
    """The port in a device's attributes; None if there is none."""
    attributes = reply.get("attributes") if isinstance(reply, Mapping) else None
    port = attributes.get(PORT_ATTRIBUTE) if isinstance(attributes, Mapping) else None
    return port if type(port) is int and 0 < port < 65536 else None


def own_hosts() -> list[str]:
    """The addresses of this machine."""
    return [interface.address for interface in recent_interfaces()]


class DevicePorts:
    """Writes this node's port to the attributes of its device, and reads the ports of other devices.

    A key that lacks a scope for either is reported once; then every device counts as having this node's port.
    """

    def __init__(self, api_url: str, port: int, hosts: Callable[[], Iterable[str]], now: Clock) -> None:
        self._api_url = api_url
        self._port = port
        self._hosts = hosts
        self._now = now
        self._known: dict[str, tuple[float, int | None]] = {}
        self._published = False
        self._may_read = True

    async def look(self, session: aiohttp.ClientSession, devices: list[TailnetDevice], own_port: int) -> None:
        """Publish and read the due devices, at most MAX_CALLS of them. Never raises: a failed call is retried later."""
        own_hosts = set(self._hosts())
        others = [device for device in devices if device.id and own_hosts.isdisjoint(device.hosts)]
        for device in devices:
            if not self._published and device.id and not own_hosts.isdisjoint(device.hosts):
                await self._publish(session, device, own_port)
        self._known = {device.id: self._known[device.id] for device in others if device.id in self._known}
        oldest = sorted(others, key=lambda device: self._known.get(device.id, (-math.inf, None))[0])
        for device in oldest[:MAX_CALLS]:
            asked_at = self._known.get(device.id, (-math.inf, None))[0]
            if self._may_read and self._now() - asked_at >= PORTS_AGAIN_S:
                await self._read(session, device)

    def addresses(self, devices: Iterable[TailnetDevice]) -> list[str]:
        """ "host:port" of each address of each device."""
        ports = {device.id: self._known.get(device.id, (0.0, None))[1] or self._port for device in devices}
        return list(dict.fromkeys(joined(host, ports[device.id]) for device in devices for host in device.hosts))

    async def _publish(self, session: aiohttp.ClientSession, device: TailnetDevice, own_port: int) -> None:
        url = f"{self._url(device)}/{PORT_ATTRIBUTE}"
        try:
            async with session.post(url, json={"value": own_port}, allow_redirects=False) as reply:
                self._published = reply.status == 200 or reply.status in REFUSED
                if reply.status in REFUSED and own_port != self._port:
                    _log.warning(
                        "the Tailscale key may not set device attributes (HTTP %d): peers cannot find out that this "
                        "node uses port %d; give the key the scope devices:posture_attributes", reply.status, own_port,
                    )  # fmt: skip
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            _log.debug("cannot publish the port of this device, retrying later: %s", exc)

    async def _read(self, session: aiohttp.ClientSession, device: TailnetDevice) -> None:
        port = self._known.get(device.id, (0.0, None))[1]
        try:
            async with session.get(self._url(device), allow_redirects=False) as reply:
                if reply.status in REFUSED:
                    self._may_read = False
                    _log.warning(
                        "the Tailscale key may not read device attributes (HTTP %d): only peers on port %d are "
                        "found; give the key the scope devices:posture_attributes:read", reply.status, self._port,
                    )  # fmt: skip
                elif reply.status == 200 and (reply.content_length or 0) <= MAX_REPLY_BYTES:
                    port = port_in(await reply.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            _log.debug("the attributes of device %s cannot be read: %s", device.id, exc)
        self._known[device.id] = self._now(), port

    def _url(self, device: TailnetDevice) -> str:
        return f"{self._api_url}/api/v2/device/{quote(device.id, safe='')}/attributes"


class TailscaleDiscovery:
    """Suggests every device of the tailnet, with the port in its attributes or else with this node's port.

    hosts: returns the addresses of this machine. A device that runs no node does not answer, which costs one dial per
    back-off.
    """

    name = "tailscale"

    def __init__(
        self,
        api_key: str,
        tailnet: str,
        port: int,
        *,
        api_url: str = API_URL,
        ask_every_s: float = ASK_EVERY_S,
        first_backoff_s: float = FIRST_BACKOFF_S,
        hosts: Callable[[], Iterable[str]] = own_hosts,
    ) -> None:
        self._headers = {"Authorization": f"Bearer {api_key}", "Accept": "application/json"}
        self._url = f"{api_url.rstrip('/')}/api/v2/tailnet/{quote(tailnet, safe='')}/devices"
        self._tailnet = tailnet
        self._ports = DevicePorts(api_url.rstrip("/"), port, hosts, monotonic)
        self._ask_every_s = ask_every_s
        self._first_backoff_s = first_backoff_s
        self._tasks = TaskOwner()

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        self._tasks.keep(lambda: self._keep_asking(own.control_port, suggest), "tailscale discovery")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        await self._tasks.close()

    async def _keep_asking(self, own_port: int, suggest: Suggest) -> None:
        reported = ""
        backoff_s = self._first_backoff_s
        limit = aiohttp.ClientTimeout(total=CALL_S)
        connector = aiohttp.TCPConnector(ssl=await trusted())
        async with aiohttp.ClientSession(connector=connector, timeout=limit, headers=self._headers) as session:
            while True:
                try:
                    devices = await self._ask(session)
                except MeshError as exc:
                    if str(exc) != reported:  # logged once, not at every retry
                        reported = str(exc)
                        _log.error("%s", exc) if isinstance(exc, TailscaleRefusedError) else _log.warning("%s", exc)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                    continue
                reported, backoff_s = "", self._first_backoff_s
                await self._ports.look(session, devices, own_port)
                for address in self._ports.addresses(devices):
                    suggest(address)
                await asyncio.sleep(self._ask_every_s)

    async def _ask(self, session: aiohttp.ClientSession) -> list[TailnetDevice]:
        """The tailnet's devices. Raises TransportError; the message never contains the key."""
        try:
            async with session.get(self._url, allow_redirects=False) as reply:
                if reply.status in (401, 403, 404):
                    raise TailscaleRefusedError(
                        f"the Tailscale API refused the key for tailnet {self._tailnet} (HTTP {reply.status}); "
                        "make a new key with read access to devices and restart the node"
                    )
                if reply.status != 200:
                    raise TransportError(f"the Tailscale API answered with HTTP status {reply.status}")
                if (reply.content_length or 0) > MAX_REPLY_BYTES:
                    raise TransportError("the Tailscale API answered with more than 8 MiB")
                return devices_in(await reply.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            reason = reason_of(exc)
            raise TransportError(f"the Tailscale API at {self._url} does not answer: {reason}") from exc
