"""Handlers that manage one peer through any node: stop, drain, log and wake; and the sleep of this machine."""

from __future__ import annotations

import ipaddress
import re

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error, quoted
from exo_mesh.base.telemetry.log_ring import MAX_RECORDS
from exo_mesh.errors import InputError


class PeerRoutes:
    """Each method answers one route. A node that is to stop first answers the call, then finishes its streams."""

    def __init__(self, context: ApiContext) -> None:
        self._peers = context.services.peers

    async def quit(self, request: web.Request) -> web.Response:
        """POST /quit: stop this node, as SIGTERM does. For programs that started the node; only from this machine."""
        if not _is_loopback(request.remote):
            return plain_error("insufficient_permissions", "POST /quit works only from the node's own machine")
        await self._peers.stops.tell("", restart=False)
        return json_response({"status": "stopping"}, 202)

    async def stop(self, request: web.Request) -> web.Response:
        """POST /admin/stop[?node_id=…]"""
        return await self._stop(request, restart=False)

    async def restart(self, request: web.Request) -> web.Response:
        """POST /admin/restart[?node_id=…]"""
        return await self._stop(request, restart=True)

    async def drain(self, request: web.Request) -> web.Response:
        """POST /admin/drain[?node_id=…]"""
        return await self._drain(request, on=True)

    async def undo_drain(self, request: web.Request) -> web.Response:
        """DELETE /admin/drain[?node_id=…]"""
        return await self._drain(request, on=False)

    async def log(self, request: web.Request) -> web.Response:
        """GET /admin/log[?node_id=…&n=100]: the last log records, oldest first. Admins only, because the log names
        addresses, paths and models."""
        wanted, text = request.query.get("node_id", ""), request.query.get("n", "100")
        if not re.fullmatch(r"[1-9][0-9]{0,2}", text) or int(text) > MAX_RECORDS:
            raise InputError(f"n must be a whole number from 1 to {MAX_RECORDS}, not {quoted(text)}", param="n")
        return json_response({"object": "list", "data": await self._peers.log(wanted, int(text))})

    async def sleep(self, request: web.Request) -> web.Response:
        """POST /admin/sleep: announce the sleep; the node then stays silent until its machine has slept and woken, at
        most one minute."""
        return json_response({"status": "asleep", "told": await self._peers.sleeps.sleep()})

    async def awake(self, request: web.Request) -> web.Response:
        """POST /admin/awake"""
        self._peers.sleeps.awake()
        return json_response({"status": "awake"})

    async def wake(self, request: web.Request) -> web.Response:
        """POST /admin/wake?node_id=…: send Wake-on-LAN from this node, and from peers in a network of that machine."""
        found = await self._peers.sleeps.wake(request.query.get("node_id", ""))
        peer = found.peer
        status = "here" if found.is_here else "sent"
        return json_response({"status": status, "node_id": peer.id, "name": peer.name, "senders": list(found.senders)})

    async def _drain(self, request: web.Request, *, on: bool) -> web.Response:
        node_id = await self._peers.drain(request.query.get("node_id", ""), on=on)
        return json_response({"draining": on, "node_id": node_id})

    async def _stop(self, request: web.Request, *, restart: bool) -> web.Response:
        wanted = request.query.get("node_id", "")
        node_id = await self._peers.stops.tell(wanted, restart=restart)
        return json_response({"status": "restarting" if restart else "stopping", "node_id": node_id}, 202)


def _is_loopback(host: str | None) -> bool:
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
