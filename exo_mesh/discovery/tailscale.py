"""Finding the machines of a Tailscale network through its API (`GET /api/v2/tailnet/{tailnet}/devices`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from exo_mesh.discovery.port import Announcement, Suggest
from exo_mesh.domain.addresses import joined
from exo_mesh.errors import InputError, MeshError, TransportError
from exo_mesh.tasks import TaskOwner

API_URL = "https://api.tailscale.com"
ASK_EVERY_S = 15.0
"""Devices of a tailnet change rarely, and the API is rate limited."""
FIRST_BACKOFF_S = 30.0
LAST_BACKOFF_S = 600.0
CALL_S = 10.0
MAX_DEVICES = 1024
MAX_REPLY_BYTES = 8 * 1024 * 1024

_log = logging.getLogger(__name__)


class TailscaleRefusedError(TransportError):
    """The API does not accept the key: asking again soon does not help."""


def read_key(path: Path) -> str:
    """The API key in a file. Raises InputError."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text"
        raise InputError(f"{path}: cannot be read: {reason}", param="tailscale_api_key_file") from exc
    if not key or any(char.isspace() for char in key) or not key.isascii():
        raise InputError(f"{path}: one Tailscale API key is needed in it", param="tailscale_api_key_file")
    return key


def device_addresses(reply: Any, port: int) -> list[str]:
    """ "host:port" of every device in the API's answer that may be on line. Raises TransportError if it is none."""
    devices = reply.get("devices") if isinstance(reply, Mapping) else None
    if not isinstance(devices, list):
        raise TransportError("the Tailscale API answered without a list of devices")
    found: list[str] = []
    for device in devices[:MAX_DEVICES]:
        if not isinstance(device, Mapping) or device.get("connectedToControl") is False:
            continue
        addresses = device.get("addresses")
        for address in addresses[:4] if isinstance(addresses, list) else ():
            try:
                found.append(joined(str(ip_address(address)), port))
            except ValueError:
                continue
    return list(dict.fromkeys(found))


class TailscaleDiscovery:
    """Suggests every device of the tailnet, with this node's port: all nodes of a mesh are set up alike.

    Devices that run no node do not answer, which costs one dial per back-off.
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
    ) -> None:
        self._headers = {"Authorization": f"Bearer {api_key}", "Accept": "application/json"}
        self._url = f"{api_url.rstrip('/')}/api/v2/tailnet/{quote(tailnet, safe='')}/devices"
        self._tailnet = tailnet
        self._port = port
        self._ask_every_s = ask_every_s
        self._first_backoff_s = first_backoff_s
        self._tasks = TaskOwner()

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        self._tasks.keep(lambda: self._keep_asking(suggest), "tailscale discovery")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that a bug has ended; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        await self._tasks.close()

    async def _keep_asking(self, suggest: Suggest) -> None:
        told = ""
        backoff_s = self._first_backoff_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as session:
            while True:
                try:
                    addresses = await self._ask(session)
                except MeshError as exc:
                    if str(exc) != told:  # each trouble is told once, not at every try
                        told = str(exc)
                        _log.error("%s", exc) if isinstance(exc, TailscaleRefusedError) else _log.warning("%s", exc)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                    continue
                told, backoff_s = "", self._first_backoff_s
                for address in addresses:
                    suggest(address)
                await asyncio.sleep(self._ask_every_s)

    async def _ask(self, session: aiohttp.ClientSession) -> list[str]:
        """Addresses of the tailnet's devices. Raises TransportError; never tells the key."""
        try:
            async with session.get(self._url, headers=self._headers, allow_redirects=False) as reply:
                if reply.status in (401, 403, 404):
                    raise TailscaleRefusedError(
                        f"the Tailscale API refused the key for tailnet {self._tailnet} (HTTP {reply.status}); "
                        "make a new key with read access to devices and restart the node"
                    )
                if reply.status != 200:
                    raise TransportError(f"the Tailscale API answered HTTP {reply.status}")
                if (reply.content_length or 0) > MAX_REPLY_BYTES:
                    raise TransportError("the Tailscale API answered with more than 8 MiB")
                return device_addresses(await reply.json(content_type=None), self._port)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            reason = str(exc) or type(exc).__name__
            raise TransportError(f"the Tailscale API at {self._url} does not answer: {reason}") from exc
