"""Handlers that stop and restart nodes."""

from __future__ import annotations

import ipaddress

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.routes import ADMIN, Route, RouteTable


class StopRoutes:
    """Each method answers one route. A node first answers the call, then finishes its streams, then stops."""

    def __init__(self, context: ApiContext) -> None:
        self._peers = context.services.peers

    def table(self) -> RouteTable:
        """The routes."""
        peer = {"node_id": "name or id of a peer, or at least 4 digits of its id; this node by default"}
        return [
            Route("POST", ("/quit",), self.quit, ADMIN, "Stop this node; from this machine only", status=202),
            Route(
                "POST", ("/admin/stop",), self.stop, ADMIN, "Stop a node",
                status=202, errors=(400, 404, 503), query=peer,
            ),
            Route(
                "POST", ("/admin/restart",), self.restart, ADMIN, "Restart a node",
                status=202, errors=(400, 404, 503), query=peer,
            ),
        ]  # fmt: skip

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
