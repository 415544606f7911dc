"""Handlers that manage one peer through any node: drain, log and wake; and the sleep of this machine."""

from __future__ import annotations

import re

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, quoted
from exo_mesh.api.routes import ADMIN, Route, RouteTable
from exo_mesh.base.telemetry.log_ring import MAX_RECORDS
from exo_mesh.errors import InputError


class PeerRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._peers = context.services.peers

    def table(self) -> RouteTable:
        """The routes."""
        peer = {"node_id": "name or id of a peer, or at least 4 digits of its id; this node by default"}
        # fmt: off
        return [
            Route(
                "POST", ("/admin/drain",), self.drain, ADMIN, "Let a node accept no new requests",
                errors=(400, 404, 503), query=peer,
            ),
            Route(
                "DELETE", ("/admin/drain",), self.undo_drain, ADMIN, "Let a node accept requests again",
                errors=(400, 404, 503), query=peer,
            ),
            Route(
                "GET", ("/admin/log",), self.log, ADMIN, "The last log records of a node", errors=(400, 404, 503),
                query={**peer, "n": f"most records, 1 to {MAX_RECORDS}; 100 by default"},
            ),
            Route("POST", ("/admin/sleep",), self.sleep, ADMIN, "Announce that this machine goes to sleep"),
            Route("POST", ("/admin/awake",), self.awake, ADMIN, "Rejoin the mesh after /admin/sleep"),
            Route(
                "POST", ("/admin/wake",), self.wake, ADMIN, "Wake the machine of a peer by Wake-on-LAN",
                errors=(400, 404), query={"node_id": "name or id of a peer that this node has met"},
            ),
        ]
        # fmt: on

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
